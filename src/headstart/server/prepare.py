"""Prepare prompts (templates, tokens, grammars) so that none of them delays others or ends the server.

Small work is done in a few threads of the server. A long text is tokenised in a worker process, and a new grammar is
tried in one before the server compiles it: processes can be killed, and are when the client disconnects or the time
is up. Clients take turns at both threads and processes, and neither waits for the other.
"""

import asyncio
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn, TypeVar

from fastapi import Request as HTTPRequest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import Busy, RequestError
from ..sampling import GrammarSpec, compile_grammar, find_grammar
from ..sampling.bounds import check_bounds, is_gbnf
from ..sampling.grammar import LIMITS, Grammar, llguidance_grammar
from ..sampling.matcher import MASK_SECONDS
from .errors import Refusal, refuse
from .settings import Limits
from .threads import Threads
from .worker import Encoder, Kind
from .workers import WorkerDied, Workers

Result = TypeVar("Result")

THREADS = 4
SMALL = 2**15  # characters: takes at most 0.1 s to tokenise


def timed_out(limits: Limits) -> Refusal:
    """Return the refusal of a request that has not ended by its deadline."""
    return _too_late(f"request not finished within {limits.request_seconds:g} s: ask for fewer tokens")


def _too_late(message: str) -> Refusal:
    return Refusal(408, message, code="timeout", headers={"x-should-retry": "false"})  # it would fail again


@asynccontextmanager
async def waiting(http: HTTPRequest, until: float, late: Refusal) -> AsyncIterator[None]:
    """Cancel what the block waits for when the client disconnects, or at a time by the event loop's clock."""
    limit = asyncio.timeout_at(until)

    async def watch() -> None:
        await disconnected(http)
        limit.reschedule(0.0)  # now

    watcher = asyncio.create_task(watch())
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise Refusal(499, "client disconnected", code="gone") if watcher.done() else late from None
    finally:
        watcher.cancel()


class Preparer:
    def __init__(self, tokenizer: TokenizerWrapper, limits: Limits, *, context: int, max_waiting: int | None):
        """Create threads and worker processes. At most `max_waiting` prompts may wait while others are prepared."""
        self.tokenizer = tokenizer
        self.limits = limits
        self._context = context
        self.workers = Workers(tokenizer)
        self.threads = Threads(THREADS, "prepare")
        self._max_waiting = max_waiting
        self._in_progress: Counter[str] = Counter()  # prompts by client

    def start(self) -> None:
        """Start what is slow to start, in the background."""
        self.workers.start()
        self.threads.submit(lambda: (self.max_characters, self.encoder))

    async def close(self) -> None:
        await self.workers.close()
        self.threads.close()

    @cached_property
    def encoder(self) -> Encoder:
        return Encoder(self.tokenizer._tokenizer.backend_tokenizer)

    @property
    def max_tokens(self) -> int:
        """Return the most tokens of a prompt."""
        return min(self._context - 1, self.limits.prompt_tokens or self._context)

    @property
    def max_characters(self) -> int:
        """Return the length above which any text has too many tokens."""
        return self.max_tokens * self._longest_token

    @cached_property
    def _longest_token(self) -> int:
        return max(len(token.encode()) for token in self.tokenizer.get_vocab())

    @asynccontextmanager
    async def preparing(
        self, http: HTTPRequest, client: str, deadline: float, *, counting: bool = False
    ) -> AsyncIterator["Preparation"]:
        """Prepare a prompt in this block, until the client disconnects or the time is up.

        Args:
            deadline: of the whole request, by the event loop's clock.
            counting: accept a prompt that is too long for the model, to count its tokens.
        """
        self._check_busy(client)
        now, seconds = asyncio.get_running_loop().time(), self.limits.prepare_seconds
        late = f"prompt not prepared within {seconds:g} s: shorten it"
        refusal = _too_late(late) if now + seconds < deadline else timed_out(self.limits)
        self._in_progress[client] += 1
        try:
            async with waiting(http, min(now + seconds, deadline), refusal):
                yield Preparation(self, client, counting)
        finally:
            self._in_progress[client] -= 1
            self._in_progress += Counter()  # drops clients that have none

    def _check_busy(self, client: str) -> None:
        if self._max_waiting is None:
            return
        # The last eighth is for clients that have no prompt in progress: one client cannot fill it all.
        reserved = self._max_waiting // 8 if self._in_progress[client] else 0
        if self._in_progress.total() > self._max_waiting - reserved:
            message = f"{self._in_progress.total()} prompts are being prepared already: try again in a moment"
            raise Busy(message, retry_after=1)


async def disconnected(http: HTTPRequest) -> None:
    """Return when the client disconnects. Its body must have been read."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


@dataclass(frozen=True)
class Preparation:
    """The preparation of one client's prompt."""

    preparer: Preparer
    client: str
    counting: bool = False

    async def run(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Return what a function returns in a thread. It cannot be stopped, so it must be quick."""
        return await self.preparer.threads.run(self.client, function, *arguments)

    def check_characters(self, characters: int, param: str) -> None:
        """Refuse a text that has too many tokens whatever it says."""
        if characters > self.preparer.max_characters:
            _too_long(param, self.preparer.max_tokens)

    def check_tokens(self, tokens: list[int], param: str) -> None:
        if not self.counting and len(tokens) > self.preparer.max_tokens:
            _too_long(param, self.preparer.max_tokens, len(tokens))

    async def encode(self, text: str, param: str, *, kind: Kind, mark: str = "") -> list[int]:
        """Return the tokens of a text. For `kind` and `mark` see worker.py."""
        self.check_characters(len(text), param)
        if len(text) <= SMALL:
            tokens = await self.run(self.preparer.encoder.tokens, text, kind, mark)
        else:
            tokens = await self._encode_long(text, param, kind, mark)
        self.check_tokens(tokens, param)
        return tokens

    async def _encode_long(self, text: str, param: str, kind: Kind, mark: str) -> list[int]:
        limit = None if self.counting else self.preparer.max_tokens
        data = await self.run(text.encode)
        try:
            async with self.preparer.workers.worker(self.client) as worker:
                answer, found = await worker.call({"kind": kind, "mark": mark, "limit": limit}, data)
        except WorkerDied:
            refuse(param, "the text could not be tokenised within the server's memory: shorten it")
        if "more_than" in answer:
            _too_long(param, self.preparer.max_tokens)
        if "error" in answer:
            refuse(param, f"the text could not be tokenised: {answer['error']}")
        return await self.run(lambda: array("I", found).tolist())

    async def grammar(self, spec: GrammarSpec | None, field: str) -> Grammar | None:
        """Return the compiled grammar that came in `field`, or refuse that field."""
        try:
            if spec is None:
                return None
            return find_grammar(spec, self.preparer.tokenizer) or await self._compile(spec)
        except RequestError as error:
            raise Refusal(400, f"{field}: {error}", param=field, code="invalid_value") from error

    async def as_lark(self, spec: GrammarSpec | None, field: str) -> GrammarSpec | None:
        """Return a grammar in llama.cpp's language as one in Lark's; any other as it is."""
        if spec is None or spec.kind != "lark" or not is_gbnf(spec.source):
            return spec
        check_bounds("lark", spec.source)
        try:
            async with self.preparer.workers.worker(self.client) as worker:
                message = {"gbnf": spec.source, "seconds": self.preparer.limits.grammar_seconds}
                answer, _ = await worker.call(message)
        except (TimeoutError, WorkerDied):
            answer = {"error": "it takes too much time or memory to read"}
        if "error" in answer:
            refuse(field, f"grammar is not a usable GBNF: {answer['error']}")
        return GrammarSpec("lark", answer["lark"])

    async def _compile(self, spec: GrammarSpec) -> Grammar:
        preparer, seconds = self.preparer, self.preparer.limits.grammar_seconds
        source = await self.run(_source, spec)
        # The trial allows a quarter of the time per mask: hardly any grammar then fails after its answer has begun.
        message = {"grammar": source, "limits": LIMITS, "seconds": seconds, "mask_seconds": MASK_SECONDS / 4}
        async with preparer.workers.worker(self.client) as worker:
            try:
                answer, _ = await worker.call(message)
            except TimeoutError:
                raise RequestError(f"grammar could not be compiled within {seconds:g} s: simplify it") from None
            except WorkerDied:
                raise RequestError("grammar needs too much memory or recursion: simplify it") from None
            if "error" in answer:
                raise RequestError(f"grammar cannot be followed: {answer['error']}: simplify it")
            # The client keeps the worker meanwhile, so that no more grammars are compiled at once than there are.
            return await asyncio.to_thread(compile_grammar, spec, preparer.tokenizer)


def _source(spec: GrammarSpec) -> str:
    """Return a grammar in llguidance's syntax, once its size has been checked."""
    check_bounds(spec.kind, spec.source)
    return llguidance_grammar(spec)


def _too_long(param: str, limit: int, length: int | None = None) -> NoReturn:
    """Refuse a prompt in Anthropic's words, by which Claude Code knows that it must summarise."""
    found = f"more than {limit} tokens" if length is None else f"{length} tokens"
    refuse(param, f"prompt is too long: {found} > {limit} maximum: shorten it", "context_length_exceeded")
