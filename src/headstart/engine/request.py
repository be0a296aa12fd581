"""What callers give to the engine and get from it: requests, events and handles."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Lock
from types import NoneType
from typing import Literal

import mlx.core as mx

from ..error_log import LOG, log_error
from ..errors import HeadstartError, RequestError, check_type
from ..models import Model
from ..sampling import SamplingParams
from .images import PromptImage, check_images
from .stats import Origin, Stats

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Request:
    """A prompt and how to answer it.

    Args:
        prompt: Token ids.
        params: How each answer is generated.
        n: Answers to the prompt, which is prefilled once. Under one seed they differ from each other.
        keep_logits: Hand out the target's logits with every token.
        priority: Requests wait while others of a lower number do. Once started they run like others.
        images: The images that placeholder tokens in the prompt stand for, see `insert_images`.
        adapter: The name of one of the model's adapters.
    """

    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    keep_logits: bool = False
    priority: int = 0
    images: Sequence[PromptImage] = ()
    adapter: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.prompt, str):
            raise RequestError("prompt is text; it must be token ids: encode it with the tokenizer")
        if isinstance(self.prompt, (bytes, bytearray, memoryview)):
            raise RequestError(f"prompt is {type(self.prompt).__name__}; it must be token ids")

    def check(self, model: Model) -> None:
        """Raise RequestError if this model cannot answer the request."""
        length, context, vocabulary = len(self.prompt), model.context_length, model.vocabulary
        if not length:
            raise RequestError("prompt is empty: give at least one token")
        if length >= context:
            raise RequestError(
                f"prompt has {length} tokens, and the model's context of {context} leaves no room for an answer: "
                f"shorten it to {context - 1} tokens or fewer"
            )
        if not 0 <= min(self.prompt) <= max(self.prompt) < vocabulary:
            wrong = next(token for token in self.prompt if not 0 <= token < vocabulary)
            raise RequestError(f"prompt has the token id {wrong}: ids go from 0 to {vocabulary - 1}")
        check_type(self.adapter, (str, NoneType), "adapter", "give the name of one")
        if self.adapter is not None and self.adapter not in model.adapters:
            known = ", ".join(model.adapters) or "none"
            raise RequestError(f"adapter {self.adapter[:100]!r} is unknown: this model has {known}")
        check_images(self.images, self.prompt, model)
        if not 1 <= self.n:
            raise RequestError(f"n is {self.n}; it must be at least 1")
        self.params.check_tokens(vocabulary)
        if self.params.k not in ("auto", 0) and not model.most_drafts:
            reason = (model.head_unavailable or "it has no head").removesuffix(".")
            raise RequestError(f"k is {self.params.k}, but this model cannot draft: {reason}. Use 'auto' or 0")


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability of a token, and of the most probable tokens in its place, best first."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Event:
    """The tokens of one round, the progress of prefill (`prompt_processed`), or the end of an answer.

    The last event of each answer has a `finish_reason`.
    """

    tokens: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # what each token adds; empty if the engine has no tokenizer
    logprobs: list[TokenLogprobs] | None = None  # if requested
    logits: mx.array | None = None  # [len(tokens), V], if requested
    finish_reason: FinishReason | None = None
    stop: str | None = None  # the stop string that ended it
    stats: Stats | None = None  # of the whole answer so far
    error: HeadstartError | None = None
    prompt_processed: int = 0  # tokens of the prompt that are prefilled
    choice: int = 0  # which of the request's answers it belongs to


class Handle:
    """A submitted request. Iterate it for its events; if the engine has no thread of its own, that also runs it."""

    def __init__(
        self,
        request: Request,
        run_once: Callable[[], object] | None,
        listener: Callable[[Event], None] | None = None,
    ):
        self.request = request
        self.cancelled = False
        self._unread = request.n  # answers whose last event was not read yet
        self._ended: set[int] = set()  # answers whose last event was put
        self._lock = Lock()
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._run_once = run_once
        self._listener = listener or self._events.put

    def cancel(self) -> None:
        """Stop before the next step. Events that were sent remain readable."""
        self.cancelled = True

    def put(self, event: Event) -> None:
        """Deliver an event. Two threads may end an answer at once: the first one counts."""
        with self._lock:
            if event.choice in self._ended:
                return
            if event.finish_reason is not None:
                self._ended.add(event.choice)
        try:
            self._listener(event)
        except Exception as error:  # it has missed an event, so it gets no more
            log_error(LOG, "a listener failed; its request is cancelled", error=error)
            self._listener = ignore_event
            self.cancelled = True

    def __iter__(self) -> Iterator[Event]:
        while self._unread:
            try:
                event = self._events.get(block=self._run_once is None)
            except Empty:
                assert self._run_once is not None
                self._run_once()
                continue
            self._unread -= event.finish_reason is not None
            yield event


def ignore_event(event: Event) -> None:
    """Receive an event that nobody waits for."""
