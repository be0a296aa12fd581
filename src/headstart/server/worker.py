"""A process that tokenises long texts and tries grammars, so that one of them can crash or be killed without harm.

Run as a script in a fresh interpreter: it imports nothing of Headstart, starts in a fraction of a second and takes
little memory. Requests arrive on standard input and answers leave on standard output, each one line of JSON. The
process ends when its input does, also in the middle of a request.
"""

import json
import os
import queue
import runpy
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

MEMORY = 2 * 2**30  # bytes beyond what the tokenizer takes
PIECE = 2**16  # characters of a text that is counted in pieces
TRIAL_TOKENS = 64  # that a grammar is followed for, at most
TRIAL_SECONDS = 0.25  # of CPU time for that
NICENESS = 5  # the server's own threads come first


def run_worker() -> None:
    """Answer requests until the input ends. The first line holds the settings."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this process
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is not an answer
    with suppress(OSError):
        os.nice(NICENESS)
    settings = json.loads(sys.stdin.buffer.readline())
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.stack_size(settings["stack"])
    threading.Thread(target=answer_requests, args=(settings, requests, answers), daemon=True).start()
    try:
        for line in sys.stdin.buffer:
            requests.put(json.loads(line))
    finally:
        os._exit(0)  # without waiting for the request in progress


def answer_requests(
    settings: dict[str, Any], requests: "queue.SimpleQueue[dict[str, Any]]", answers: BinaryIO
) -> None:
    """Answer one request after another; an unexpected error ends the process."""
    try:
        from llguidance import LLTokenizer
        from tokenizers import Tokenizer

        # encode.py lies beside this script, and imports nothing of Headstart either.
        encode_module = runpy.run_path(str(Path(__file__).with_name("encode.py")))
        encoder = encode_module["Encoder"](Tokenizer.from_str(settings["tokenizer"]))
        grammar_tokenizer = LLTokenizer(settings["tokenizer"], eos_token=settings["eos"])
        limit_memory()
        answer: dict[str, Any] = {}  # ready
        while True:
            answers.write(json.dumps(answer, separators=(",", ":")).encode() + b"\n")
            answers.flush()
            signal.setitimer(signal.ITIMER_PROF, 0)
            request = requests.get()
            answer = encode(encoder, **request) if "text" in request else try_grammar(grammar_tokenizer, **request)
    finally:
        os._exit(1)


def encode(encoder: Any, text: str, kind: str, mark: str, limit: int | None) -> dict[str, Any]:
    """Return the tokens of a text, or that there are more than `limit` of them.

    A text that is probably too long is first counted in pieces. At their ends the count is off by a few tokens, so it
    decides only where it exceeds the limit by more than that.
    """
    try:
        if limit is not None and len(text) > 4 * limit:
            count = 0
            for start in range(0, len(text), PIECE):
                count += len(encoder.tokens(text[start : start + PIECE], kind, mark))
                if count > limit + limit // 16 + 64:
                    return {"more_than": limit}
        return {"tokens": encoder.tokens(text, kind, mark)}
    except BaseException as error:  # a panic of the tokenizer is not an Exception
        return {"error": str(error)[:500]}


def try_grammar(
    tokenizer: Any, grammar: str, limits: dict[str, Any], seconds: float, mask_seconds: float
) -> dict[str, Any]:
    """Compile a grammar and follow it for some tokens. Return an error if it cannot be followed, or nothing.

    Errors in the grammar itself are left to the compiler in the server, which reports them. SIGPROF kills the process
    after `seconds` of CPU time: a busy machine does not count against the grammar.
    """
    from llguidance import LLMatcher, LLParserLimits

    signal.setitimer(signal.ITIMER_PROF, seconds)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**limits))
    end = time.thread_time() + TRIAL_SECONDS
    random = 1
    for step in range(TRIAL_TOKENS):
        start = time.thread_time()
        mask = int.from_bytes(b"" if matcher.is_error() else matcher.compute_bitmask(), "little")
        if time.thread_time() - start > mask_seconds:
            return {"error": f"finding the next tokens takes more than {mask_seconds:g} s"}
        if step and matcher.is_error():
            return {"error": matcher.get_error().replace("<non-verbose/>", "").strip()}
        if matcher.is_error() or not mask or time.thread_time() > end:
            break
        random = random * 6364136223846793005 % 2**64
        if not matcher.consume_token(pick_token(mask, random >> 33)) or matcher.is_stopped():
            break
        # The engine asks for forced tokens at every step: whatever that costs or breaks must show here.
        matcher.compute_ff_tokens()
    return {}


def pick_token(mask: int, number: int) -> int:
    """Return a set bit of a mask: the first at or above a position that depends on `number`, or the first of all."""
    position = number % mask.bit_length()
    above = mask >> position << position or mask
    return (above & -above).bit_length() - 1


def limit_memory() -> None:
    """Bound what this process may allocate from now on, where the system can, and write no core files."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = used + MEMORY if hard == resource.RLIM_INFINITY else min(used + MEMORY, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


if __name__ == "__main__":
    run_worker()
