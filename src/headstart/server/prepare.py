"""Preparing prompts: templates, tokens and grammars, so that no prompt keeps others waiting or ends the server.

What is small is done in a few threads of the server. A long text is tokenised in a worker process, and a new grammar
is tried in one before the server compiles it: those can be killed, and are when the client disconnects or the time
is up. Clients take turns at both, and neither waits for the other.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn, TypeVar

from fastapi import Request as HTTPRequest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import Busy, RequestError
from ..sampling import GrammarSpec, compile_grammar, find_grammar
from ..sampling.bounds import check_bounds
from ..sampling.grammar import LIMITS, MASK_SECONDS, Grammar, llguidance_grammar
from .deadline import Deadline
from .encode import Encoder, Kind
from .errors import Refusal, refuse
from .limits import Limits
from .turns import Turns
from .workers import WorkerDied, Workers

Result = TypeVar("Result")

THREADS = 4
SMALL = 2**15  # characters: takes 0.1 s at worst to tokenise


class TooHard(RequestError):
    """A grammar that cannot be compiled within the limits of a worker process."""


class Preparer:
    def __init__(self, tokenizer: TokenizerWrapper, limits: Limits, *, context: int, most: int | None):
        """`most` prompts may wait while another is prepared."""
        self.tokenizer, self.limits, self.context, self._most = tokenizer, limits, context, most
        self.workers = Workers(tokenizer)
        self._turns = Turns(THREADS, THREADS - 1)  # one thread is always left to others
        self._threads = ThreadPoolExecutor(THREADS, "prepare")
        self.compiling = ThreadPoolExecutor(2, "compile")
        self._inside: Counter[str] = Counter()  # by client

    def start(self) -> None:
        """Start what is slow to start, in the background."""
        self.workers.start()
        self._threads.submit(lambda: (self.most_characters, self.encoder))

    async def close(self) -> None:
        await self.workers.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.compiling.shutdown(wait=False, cancel_futures=True)

    @cached_property
    def encoder(self) -> Encoder:
        return Encoder.of(self.tokenizer._tokenizer.backend_tokenizer)

    @property
    def most_tokens(self) -> int:
        """The longest prompt that is taken."""
        return min(self.context - 1, self.limits.prompt_tokens or self.context)

    @cached_property
    def most_characters(self) -> int:
        """A text of more has too many tokens, whatever it says."""
        return self.most_tokens * max(len(token.encode()) for token in self.tokenizer.get_vocab())

    async def prepare(
        self,
        work: "Callable[[Preparation], Awaitable[Result]]",
        http: HTTPRequest,
        client: str,
        deadline: Deadline,
        *,
        counting: bool = False,
    ) -> Result:
        """Return what `work` makes of a prompt. It ends when the client disconnects or the time is up.

        `counting`: a prompt that is too long is to be counted all the same.
        """
        self._check_busy(client)
        loop = asyncio.get_running_loop()
        working = asyncio.ensure_future(work(Preparation(self, client, counting)))
        gone = asyncio.create_task(disconnected(http))
        self._inside[client] += 1
        try:
            left = min(self.limits.prepare_seconds, max(0.0, deadline.at - loop.time()))
            await asyncio.wait((working, gone), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            if gone.done():
                raise Refusal(499, "the client has gone", code="gone")
            raise self._late(deadline)
        finally:
            self._inside[client] -= 1
            self._inside += Counter()  # drops clients that have none
            working.cancel()
            gone.cancel()

    async def run(self, client: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """Return what a function returns in a thread, when it is the client's turn."""
        loop = asyncio.get_running_loop()
        await self._turns.take(client)
        doing = self._threads.submit(function, *arguments)

        def give_back(_: Future[Result]) -> None:  # also when nobody waits for it any more, but not before it ends
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._turns.give_back, client)

        doing.add_done_callback(give_back)
        try:
            return await asyncio.wrap_future(doing)
        except Exception:
            raise
        except BaseException as error:
            raise _unpanicked(error) from error

    def _check_busy(self, client: str) -> None:
        if self._most is None:
            return
        # The last eighth is for clients that have none: nobody fills it all.
        kept = self._most // 8 if self._inside[client] else 0
        if self._inside.total() > self._most - kept:
            message = f"{self._inside.total()} prompts are being prepared already: try again in a moment"
            raise Busy(message, retry_after=1)

    def _late(self, deadline: Deadline) -> Refusal:
        if deadline.seconds <= self.limits.prepare_seconds:
            return deadline.missed()
        message = f"prompt not prepared within {self.limits.prepare_seconds:g} s: shorten it"
        return Refusal(408, message, code="timeout", headers={"x-should-retry": "false"})


@dataclass(frozen=True)
class Preparation:
    """One prompt's: where its parts are done."""

    preparer: Preparer
    client: str
    counting: bool = False

    async def run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Return what a function returns in a thread. It must be done soon: it cannot be stopped."""
        return await self.preparer.run(self.client, function, *arguments)

    def check_characters(self, characters: int, param: str) -> None:
        """Refuse a text that is too long by any count."""
        if characters > self.preparer.most_characters:
            _too_long(param, self.preparer.most_tokens)

    def check_tokens(self, tokens: list[int], param: str) -> None:
        if not self.counting and len(tokens) > self.preparer.most_tokens:
            _too_long(param, self.preparer.most_tokens, len(tokens))

    def is_small(self, text: str) -> bool:
        """Return whether a text can be tokenised in a thread."""
        return len(text) <= SMALL

    def encode_here(self, text: str, param: str, kind: Kind, mark: str) -> list[int]:
        """Return the tokens of a small text."""
        tokens = self.preparer.encoder.tokens(text, kind, mark)
        self.check_tokens(tokens, param)
        return tokens

    async def encode(self, text: str, param: str, *, kind: Kind, mark: str = "") -> list[int]:
        """Return the tokens of a text. What `kind` and `mark` mean is said in encode.py."""
        self.check_characters(len(text), param)
        preparer = self.preparer
        if self.is_small(text):
            return await self.run(self.encode_here, text, param, kind, mark)
        most = None if self.counting else preparer.most_tokens
        message = {"text": text, "kind": kind, "mark": mark, "most": most}
        try:
            async with preparer.workers.worker(self.client) as worker:
                answer = await worker.call(message)
        except WorkerDied:
            refuse(param, "the text could not be tokenised within the server's memory: shorten it")
        if "more_than" in answer:
            _too_long(param, preparer.most_tokens)
        if "error" in answer:
            refuse(param, f"the text could not be tokenised: {answer['error']}")
        self.check_tokens(answer["tokens"], param)
        return list(answer["tokens"])

    async def grammar(self, spec: GrammarSpec | None, field: str) -> Grammar | None:
        """Return the grammar that came in `field`, compiled; refuse what cannot be by that name."""
        try:
            if spec is None:
                return None
            return find_grammar(spec, self.preparer.tokenizer) or await self._compile(spec)
        except RequestError as error:
            raise Refusal(400, f"{field}: {error}", param=field, code="invalid_value") from error

    async def _compile(self, spec: GrammarSpec) -> Grammar:
        preparer, seconds = self.preparer, self.preparer.limits.grammar_seconds
        source = await self.run(_checked, spec)
        # What is tried is held to a quarter, so that hardly any grammar fails only once its answer has begun.
        message = {"grammar": source, "limits": LIMITS, "seconds": seconds, "mask_seconds": MASK_SECONDS / 4}
        async with preparer.workers.worker(self.client) as worker:
            try:
                answer = await worker.call(message)
            except TimeoutError:
                raise TooHard(f"grammar could not be compiled within {seconds:g} s: simplify it") from None
            except WorkerDied:
                raise TooHard("grammar needs too much memory or recursion: simplify it") from None
            if "error" in answer:
                raise TooHard(f"grammar cannot be followed: {answer['error']}: simplify it")
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(preparer.compiling, compile_grammar, spec, preparer.tokenizer)


async def disconnected(http: HTTPRequest) -> None:
    """Return when the client disconnects. Its body must have been read."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _checked(spec: GrammarSpec) -> str:
    """Return a grammar in llguidance's words, once it is known to be of a size that can be."""
    check_bounds(spec.kind, spec.source)
    try:
        return llguidance_grammar(spec)
    except ValueError as error:
        raise RequestError(f"grammar is no {spec.kind} that can be used: {error}") from error


def _too_long(param: str, most: int, length: int | None = None) -> NoReturn:
    """In Anthropic's words, by which Claude Code knows that it must summarise."""
    found = f"more than {most} tokens" if length is None else f"{length} tokens"
    refuse(param, f"prompt is too long: {found} > {most} maximum: shorten it", "context_length_exceeded")


def _unpanicked(error: BaseException) -> BaseException:
    """Return an error that is answered as such: a panic in a library's Rust code is no Exception."""
    if type(error).__name__ != "PanicException":
        return error
    return Refusal(400, f"the prompt could not be prepared: {str(error)[:500]}", code="invalid_value")
