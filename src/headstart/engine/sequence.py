"""The host's side of one sequence: its parameters, its tokens so far, and the events it sends to its request."""

import secrets
import time
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..error_log import LOG, log_error
from ..errors import HeadstartError, RequestError
from ..models import Model
from ..sampling import Logprobs, Matcher, SequenceParams, compile_grammar
from ..state import Chunks
from ..state.snapshot import Snapshot
from .batch import Batch
from .copies import CopyIndex
from .device_error import explain
from .draft_history import DraftHistory
from .images import SequenceImages
from .limit import DraftLimit, request_limit
from .prompt_pass import PromptPass
from .request import Event, FinishReason, Handle, TokenLogprobs
from .stats import Stats, origins
from .text import TextStream


@dataclass(eq=False)
class SequenceState:
    handle: Handle
    params: SequenceParams
    limits: DraftLimit
    history: DraftHistory  # of the head's drafts, for the depth controller
    copies: CopyIndex | None  # what it could copy; None if it must not
    stats: Stats
    text: TextStream
    matcher: Matcher | None  # of its grammar
    tokens: list[int] = field(default_factory=list)  # the prompt and what was generated
    images: SequenceImages | None = None
    siblings: list["SequenceState"] = field(default_factory=list)  # other answers to its prompt, until that is in
    batch: Batch | None = None  # its own, during prefill
    chunks: Chunks | None = None  # in which it is prefilled
    prompt_end: int = 0  # its tokens up to here are read as a prompt
    apart: int = 0  # tokens that its prompt shares with others: see `PrefixCache.fork`
    num_prefilled: int = 0
    kept: tuple[int, Snapshot] | None = None  # after how many tokens the last pass kept the state, and that
    reading: PromptPass | None = None  # the pass over its prompt that is under way
    num_reported: int = 0  # tokens of the prompt that were reported as prefilled
    started: float = 0.0
    finished: bool = False
    retried: bool = False  # its prefill ran out of memory before
    suspect: bool = False  # a batch with it failed; not yet retried alone
    cleared: bool = False  # it was retried alone, and did not fail
    failures: int = 0  # commands of the device that failed since its last token

    @classmethod
    def of(
        cls, handle: Handle, model: Model, tokenizer: TokenizerWrapper | None, max_k: int, key: int | None = None
    ) -> "SequenceState":
        """Return the sequence of a request's first answer, with those of the others as its siblings.

        `key` of its random numbers: given if another machine has drawn it. Raises RequestError if the request needs a
        tokenizer and there is none.
        """
        request, grammar = handle.request, None
        params = request.params
        if tokenizer is not None:
            end_tokens = {token for token in tokenizer.eos_token_ids if token < model.vocabulary}
            params = replace(params, stop_ids=frozenset(params.stop_ids) | end_tokens)
            if params.grammar is not None:
                grammar = compile_grammar(params.grammar, tokenizer)
        elif params.stop:
            raise RequestError("stop needs text, and this engine has no tokenizer: use stop_ids")
        elif params.grammar is not None:
            raise RequestError("grammar needs text, and this engine has no tokenizer: give it the model's")
        if key is None:  # without a seed, answers differ from request to request
            key = params.seed if params.seed is not None else secrets.randbits(64)
        limits = request_limit(params, model, max_k)
        k, copied, bypass_reason = limits
        drafter = {model.drafter.kind: k} if model.drafter is not None else {}
        named = {**drafter, "native_mtp": model.has_head and k, "copy": copied}
        sources = [name for name, used in named.items() if used]
        stats = Stats(
            "+".join(sources) or None,
            bypass_reason,
            clamped_to=k if k and params.k != "auto" and k < params.k else None,
            prompt_tokens=len(request.prompt),
            dtype=model.dtype_name,
            ranks=model.share.ranks,
            adapter=request.adapter,
        )
        limit = min(params.max_tokens, model.context_length - len(request.prompt))
        images = None
        if request.images and model.tower is not None:
            images = SequenceImages(request.images, len(request.prompt), model.tower)
        first, *siblings = [
            cls(
                handle,
                SequenceParams(params, key, choice, limit),
                limits,
                DraftHistory(k),
                CopyIndex(copied) if copied else None,
                stats,
                TextStream(tokenizer, params.stop),
                grammar.matcher(params.stop_ids, model.vocabulary) if grammar is not None else None,
                list(request.prompt),
                images,
            )
            for choice in range(request.n)
        ]
        first.siblings = siblings
        return first

    @property
    def cache_keys(self) -> list[int]:
        """Return its tokens as the prefix cache knows them."""
        return self.tokens if self.images is None else self.images.cache_keys(self.tokens)

    @property
    def auto_depth(self) -> bool:
        """Return whether the depth controller chooses its depth."""
        return self.copies is not None or (self.params.params.k == "auto" and self.history.max_k > 0)

    @property
    def num_generated(self) -> int:
        return self.stats.generation_tokens

    @property
    def limit(self) -> int:
        return self.params.limit

    def find_copies(self, pool: DraftHistory) -> CopyIndex | None:
        """Return what its newest tokens repeat; `pool` counts how often copies go on."""
        if self.copies is not None:
            self.copies.update(self.tokens, pool)
        return self.copies

    def emit(
        self,
        tokens: list[int],
        proposed: int,
        copied: int = 0,
        logits: mx.array | None = None,
        logprobs: Logprobs | None = None,
        *,
        block: bool = False,
    ) -> None:
        """Send a round's tokens to the request, up to the end of the answer.

        Args:
            tokens: The accepted drafts and the token after them.
            proposed: Drafts that could have been accepted.
            copied: How many of the drafts were copied from the context.
            logits: [k+1, V], for each of the tokens.
            logprobs: Of each of the tokens.
            block: The other drafts are the block drafter's, not the head's.
        """
        accepted = len(tokens) - 1
        tokens = tokens[: self.limit - self.num_generated]
        if self.matcher is not None:
            tokens = tokens[: self.matcher.advance(tokens)]
        texts, reason = self._decode(tokens)
        tokens = tokens[: len(texts)]
        self.tokens += tokens
        self.failures = 0
        self.stats.count(len(tokens), accepted, proposed, copied, time.perf_counter() - self.started, block=block)
        if reason is None and self.matcher is not None and self.matcher.stopped:
            reason = "stop"
        if reason is None and self.num_generated >= self.limit:
            reason = "length"
        if reason is not None:
            self.finished = True
            texts[-1] += self.text.finish()
            reason = "stop" if self.text.stopped else reason
        if tokens:
            asked, scores, kept = self.params.params, None, None
            if asked.logprobs and logprobs is not None:
                scores = read_logprobs(Logprobs(*[a[: len(tokens)] for a in logprobs]), asked.top_logprobs)
            if self.handle.request.keep_logits and logits is not None:
                kept = logits[: len(tokens)]
                mx.eval(kept)  # another thread may read it, and cannot evaluate it
            self.put(
                tokens=tokens,
                origins=origins(len(tokens), accepted, proposed, copied),
                texts=texts,
                logprobs=scores,
                logits=kept,
                finish_reason=reason,
                stop=self.text.stop,
            )
        if reason is None and self.matcher is not None and self.matcher.failed is not None:
            self.fail(self.matcher.failed)

    def put(self, **told: Any) -> None:
        """Send an event that has these fields, with the stats so far."""
        self.handle.put(Event(**told, stats=self.stats.copy(), choice=self.params.choice))

    def fail(self, error: Exception) -> None:
        """End with an error that concerns this sequence alone, and log where it was raised."""
        log_error(LOG, "a sequence failed; its request ends with an error", error=error)
        self.finish("error", error)

    def finish(self, reason: FinishReason, error: Exception | None = None) -> None:
        self.finished = True
        self.matcher = None
        if error is not None and not isinstance(error, HeadstartError):
            error = explain(error)
        self.put(finish_reason=reason, error=error)
        for sibling in self.siblings:
            sibling.finish(reason, error)

    def fork(self) -> list["SequenceState"]:
        """Return this sequence and its siblings once the prompt is in: from here on they are independent."""
        siblings, self.siblings = self.siblings, []
        for sibling in siblings:
            sibling.stats, sibling.started = self.stats.copy(), self.started
            sibling.num_reported = self.num_reported
        return [self, *siblings]

    def reset_prefill(self) -> None:
        """Start over with prefill: the state on the device is gone, so its tokens so far are the prompt now."""
        self.batch = self.reading = self.kept = None
        self.num_prefilled = 0
        if self.images is not None:
            self.images.reset()

    def _decode(self, tokens: list[int]) -> tuple[list[str], FinishReason | None]:
        """Return the text of each token, up to the first token that ends the answer."""
        texts: list[str] = []
        for token in tokens:
            ends = token in self.params.params.stop_ids
            texts.append("" if ends else self.text.add(token))
            if ends or self.text.stopped:
                return texts, "stop"
        return texts, None


def not_finite(model: Model) -> HeadstartError:
    """Return the error of a sequence whose logits are NaN or infinite."""
    remedy = "; float16 may have overflowed: set HEADSTART_DTYPE=bfloat16" if model.dtype == mx.float16 else ""
    return HeadstartError(f"the model's logits are not finite: this sequence cannot go on{remedy}")


def youngest(sequences: list[SequenceState]) -> SequenceState:
    """Return the sequence that was admitted last."""
    return max(sequences, key=lambda sequence: sequence.started)


def read_logprobs(scores: Logprobs, top: int) -> list[TokenLogprobs]:
    """Return the log-probabilities of one sequence's tokens on the host, each with the `top` best tokens."""
    chosen: list[float] = scores.chosen.tolist()  # type: ignore[assignment]
    ids: list[list[int]] = scores.top_ids.tolist()  # type: ignore[assignment]
    best: list[list[float]] = scores.top.tolist()  # type: ignore[assignment]
    return [
        TokenLogprobs(logprob, list(zip(i, b, strict=True))[:top])
        for logprob, i, b in zip(chosen, ids, best, strict=True)
    ]
