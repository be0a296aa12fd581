"""What goes into the engine and what comes out of it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Literal

import mlx.core as mx

from ..errors import HeadstartError, RequestError
from ..models import Model
from ..sampling import SamplingParams
from .log import LOG, report
from .stats import Origin, Stats

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Request:
    """A prompt and how to answer it.

    Args:
        prompt: Token ids.
        params: How each answer is generated.
        n: Answers to the prompt, which is prefilled once. Under one seed they differ from each other.
        score: Report log-probabilities of the prompt's own tokens: "no", "too" (beside an answer) or "only".
        keep_logits: Hand out the target's logits with every token.
    """

    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    score: Literal["no", "too", "only"] = "no"
    keep_logits: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.prompt, str):
            raise RequestError("prompt is text; it must be token ids: encode it with the tokenizer")

    def check(self, model: Model) -> None:
        """Refuse what cannot be honoured before any work is done."""
        length, context, vocabulary = len(self.prompt), model.context_length, model.vocabulary
        if not length:
            raise RequestError("prompt is empty: give at least one token")
        if length >= context:
            raise RequestError(
                f"prompt has {length} tokens, and the model's context of {context} leaves no room for an answer: "
                f"shorten it to {context - 1} tokens or fewer"
            )
        if (wrong := next((t for t in self.prompt if not 0 <= t < vocabulary), None)) is not None:
            raise RequestError(f"prompt holds the token id {wrong}: ids go from 0 to {vocabulary - 1}")
        if not 1 <= self.n:
            raise RequestError(f"n is {self.n}; it must be at least 1")
        self.params.check_tokens(vocabulary)
        if self.params.k not in ("auto", 0) and not model.has_head:
            reason = (model.head_unavailable or "it has no head").removesuffix(".")
            raise RequestError(f"k is {self.params.k}, but this model cannot draft: {reason}. Ask for 'auto' or 0")


@dataclass(frozen=True)
class TokenLogprobs:
    """What the model thought of a token it said, and what it would rather have said, best first."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Event:
    """What a round said to one request, or how it ended. The last event has a `finish_reason`, of each of its
    answers where there are several. While a long prompt
    is taken in, events say only how far (`prompt_processed`)."""

    tokens: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # what each token adds, if the engine has a tokenizer
    logprobs: list[TokenLogprobs] | None = None  # if the request asked
    prompt_logprobs: list[TokenLogprobs] | None = None  # of the prompt's next tokens, from its second on, if asked
    logits: mx.array | None = None  # [len(tokens), V], if the request asked
    finish_reason: FinishReason | None = None
    stop: str | None = None  # the stop string that ended it
    stats: Stats | None = None  # of the whole answer so far
    error: HeadstartError | None = None
    prompt_processed: int = 0  # tokens of the prompt that are in
    choice: int = 0  # which of the request's answers it belongs to


class Handle:
    """A request under way. Iterating gives its events; where no thread turns the engine, it turns it."""

    def __init__(
        self,
        request: Request,
        turn: Callable[[], object] | None,
        listener: Callable[[Event], None] | None = None,
    ):
        self.request = request
        self.cancelled = False
        self._left = request.n  # answers whose end was not read yet
        self._ended: set[int] = set()  # answers whose last event was put
        self._ending = Lock()
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._turn = turn
        self._listener = listener

    def cancel(self) -> None:
        """Stop at the next turn. What has been said stays said."""
        self.cancelled = True

    def put(self, event: Event) -> None:
        """Deliver an event. The first end of an answer counts: two threads may end it at once."""
        with self._ending:
            if event.choice in self._ended:
                return
            if event.finish_reason is not None:
                self._ended.add(event.choice)
        if self._listener is None:
            self._events.put(event)
            return
        try:
            self._listener(event)
        except Exception as error:  # what it missed cannot be made up for: nothing more is delivered
            report(LOG, "a listener failed; its request is cancelled", error=error)
            self._listener = _nobody
            self.cancelled = True

    def __iter__(self) -> Iterator[Event]:
        while self._left:
            try:
                event = self._events.get(block=self._turn is None)
            except Empty:
                assert self._turn is not None
                self._turn()
                continue
            self._left -= event.finish_reason is not None
            yield event


def _nobody(event: Event) -> None:
    """Listen to nothing."""
