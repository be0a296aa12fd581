"""The host's side of one sequence: what it was asked, what it has said, and how it tells."""

import secrets
import time
from dataclasses import dataclass, field, replace
from typing import Literal

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import HeadstartError, RequestError
from ..models import Model
from ..sampling import Logprobs, Matcher, SequenceParams, compile_grammar
from .batch import Batch
from .depth import Drafter
from .log import LOG, report
from .memory import is_shortage, shortage
from .request import Event, FinishReason, Handle, TokenLogprobs
from .stats import Stats, origins
from .text import TextStream


@dataclass(frozen=True)
class StepOutput:
    """What a round says to one row, on the host; its logits and log-probabilities still on the device."""

    tokens: list[int]  # accepted + 1 of them
    accepted: int
    proposed: int
    logits: mx.array | None = None  # [k+1, V]
    logprobs: Logprobs | None = None


@dataclass(eq=False)
class SequenceState:
    handle: Handle
    asked: SequenceParams
    drafter: Drafter  # what is known of its drafts
    stats: Stats
    text: TextStream | None
    matcher: Matcher | None  # of its grammar
    tokens: list[int] = field(default_factory=list)  # the prompt and all that was said
    siblings: list["SequenceState"] = field(default_factory=list)  # other answers to its prompt, until that is in
    batch: Batch | None = None  # its own while its tokens are taken in
    taken: int = 0  # tokens that are in
    scored: int = 0  # tokens of the prompt that were told of
    reported: int = 0  # tokens of the prompt that its client was told are in
    started: float = 0.0
    over: bool = False
    retried: bool = False  # it found no memory for its prompt once before
    suspect: bool = False  # a batch with it failed, and it has not been seen to run alone
    cleared: bool = False  # it has

    @classmethod
    def of(
        cls, handle: Handle, model: Model, tokenizer: TokenizerWrapper | None, max_k: int, key: int | None = None
    ) -> "SequenceState":
        """As its request asks, with the other answers to the prompt as siblings. RequestError where that needs a
        tokenizer and there is none. `key`: of its noise, where another machine has drawn it."""
        request = handle.request
        params, grammar = request.params, None
        if tokenizer is not None:
            ends = {token for token in tokenizer.eos_token_ids if token < model.vocabulary}
            params = replace(params, stop_ids=frozenset(params.stop_ids) | ends)
            if params.grammar is not None:
                grammar = compile_grammar(params.grammar, tokenizer)
        elif params.stop:
            raise RequestError("stop needs text, and this engine has no tokenizer: use stop_ids")
        elif params.grammar is not None:
            raise RequestError("grammar needs text, and this engine has no tokenizer: give it the model's")
        ceiling, bypass = _ceiling(params.k, model, max_k)
        stats = Stats(
            "native_mtp" if ceiling else None, bypass, prompt_tokens=len(request.prompt), ranks=model.share.ranks
        )
        if ceiling and params.k != "auto" and ceiling < params.k:
            stats.clamped_to = ceiling
        limit = min(params.max_tokens, model.context_length - len(request.prompt))
        # Unseeded rows differ from each other and from run to run.
        if key is None:
            key = params.seed if params.seed is not None else secrets.randbits(64)
        row, *others = [
            cls(
                handle,
                SequenceParams(params, key, choice, limit),
                Drafter(ceiling),
                stats,
                TextStream(tokenizer, params.stop) if tokenizer is not None else None,
                grammar.matcher(params.stop_ids, model.vocabulary) if grammar is not None else None,
                list(request.prompt),
            )
            for choice in range(request.n)
        ]
        row.siblings = others
        return row

    @property
    def auto(self) -> bool:
        """Its request leaves the depth open."""
        return self.asked.params.k == "auto" and self.drafter.ceiling > 0

    @property
    def fixed(self) -> int:
        """The depth that its request insists on."""
        return 0 if self.auto else self.drafter.ceiling

    @property
    def said(self) -> int:
        return self.stats.generation_tokens

    @property
    def limit(self) -> int:
        return self.asked.limit

    def say(self, round: StepOutput) -> None:
        """Hand a round's tokens to the request, up to where the answer ends."""
        tokens, matcher = round.tokens[: self.limit - self.said], self.matcher
        if matcher is not None:
            tokens = tokens[: matcher.advance(tokens)]
        texts, reason = self._read(tokens)
        tokens = tokens[: len(texts)]
        self.tokens += tokens
        self.stats.count(len(tokens), round.accepted, round.proposed, time.perf_counter() - self.started)
        if reason is None and matcher is not None and matcher.stopped:
            reason = "stop"
        if reason is None and self.said >= self.limit:
            reason = "length"
        if reason is not None:
            self.over = True
            if self.text is not None:
                texts[-1] += self.text.finish()
                reason = "stop" if self.text.stopped else reason
        request, here = self.handle.request, slice(len(tokens))
        event = Event(
            tokens,
            origins(len(tokens), round.accepted, round.proposed),
            finish_reason=reason,
            stats=self.stats.copy(),
            choice=self.asked.choice,
        )
        if self.text is not None:
            event = replace(event, texts=texts, stop=self.text.stop)
        if request.params.logprobs and round.logprobs is not None:
            told = Logprobs(*[a[here] for a in round.logprobs])
            event = replace(event, logprobs=read_logprobs(told, request.params.top_logprobs))
        if request.keep_logits and round.logits is not None:
            event = replace(event, logits=round.logits[here])
        if tokens:
            self.handle.put(event)
        if reason is None and matcher is not None and matcher.failed is not None:
            self.fail(matcher.failed)

    def fail(self, error: Exception) -> None:
        """End with an error that concerns this sequence alone, and log where it was raised."""
        report(LOG, "a sequence failed; its request ends with an error", error=error)
        self.finish("error", error)

    def finish(self, reason: FinishReason, error: Exception | None = None) -> None:
        self.over, self.matcher = True, None
        if error is not None and not isinstance(error, HeadstartError):
            error = shortage(error) if is_shortage(error) else HeadstartError(f"{type(error).__name__}: {error}")
        event = Event(finish_reason=reason, stats=self.stats.copy(), error=error, choice=self.asked.choice)
        self.handle.put(event)
        for sibling in self.siblings:
            sibling.finish(reason, error)

    def fork(self) -> list["SequenceState"]:
        """The prompt is in: from here on each answer to it is a row like any other."""
        rows, self.siblings = [self, *self.siblings], []
        for sibling in rows[1:]:
            sibling.stats, sibling.started = self.stats.copy(), self.started
            sibling.scored, sibling.reported = self.scored, self.reported
        return rows

    def reset_prefill(self) -> None:
        """Its memory is lost or was given up: all it has said becomes part of what it takes in."""
        self.batch, self.taken = None, 0

    def _read(self, tokens: list[int]) -> tuple[list[str], FinishReason | None]:
        """The text of each token up to the first that ends the answer."""
        texts: list[str] = []
        for token in tokens:
            ends = token in self.asked.params.stop_ids
            texts.append("" if ends or self.text is None else self.text.add(token))
            if ends or (self.text is not None and self.text.stopped):
                return texts, "stop"
        return texts, None


def _ceiling(k: int | Literal["auto"], model: Model, max_k: int) -> tuple[int, str | None]:
    """Most drafts a round, and why there are none."""
    most = min(max_k, model.max_k)
    if not model.has_head:
        return 0, model.head_unavailable or "the model has no head"
    if k == 0:
        return 0, "the request asked for no drafts"
    if most == 0:
        return 0, "speculation is switched off"
    return (most if k == "auto" else min(k, most)), None


def read_logprobs(told: Logprobs, most: int) -> list[TokenLogprobs]:
    """Of one row, with at most so many of the best."""
    chosen: list[float] = told.chosen.tolist()  # type: ignore[assignment]
    ids: list[list[int]] = told.top_ids.tolist()  # type: ignore[assignment]
    top: list[list[float]] = told.top.tolist()  # type: ignore[assignment]
    best = [list(zip(i, t, strict=True))[:most] for i, t in zip(ids, top, strict=True)]
    return [TokenLogprobs(c, b) for c, b in zip(chosen, best, strict=True)]
