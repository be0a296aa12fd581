"""A process that tokenises long texts and tries grammars, so that one of them can crash or be killed without harm.

Run as a script in a fresh interpreter: of Headstart it imports only encode.py, so it starts in a fraction of a second
and takes little memory. Requests come by standard input and answers go by standard output, each one JSON value after
its length in 8 bytes. The process ends when its input does, also in the middle of a request.
"""

import importlib.util
import json
import os
import queue
import signal
import struct
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

LENGTH = struct.Struct("<Q")
MEMORY = 2 * 2**30  # bytes beyond what the tokenizer takes
PIECE = 2**16  # characters of a text that is counted in pieces
WALK = 64  # tokens that a grammar is followed for, at most
WALK_SECONDS = 0.25  # and CPU time
NICENESS = 5  # the server's own threads come first


def main() -> None:
    """Answer requests until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this process
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    with suppress(OSError):
        os.nice(NICENESS)
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    settings = receive(sys.stdin.buffer)
    if settings is None:
        return
    threading.stack_size(settings["stack"])
    threading.Thread(target=serve, args=(settings, requests, answers), daemon=True).start()
    while (request := receive(sys.stdin.buffer)) is not None:
        requests.put(request)
    os._exit(0)  # without waiting for the work at hand


def serve(settings: dict[str, Any], requests: "queue.SimpleQueue[dict[str, Any]]", answers: BinaryIO) -> None:
    """Answer one request after another, and end the process where that cannot go on."""
    try:
        from llguidance import LLTokenizer
        from tokenizers import Tokenizer

        encode_py = load("encode")
        encoder = encode_py.Encoder.of(Tokenizer.from_str(settings["tokenizer"]))
        guide = LLTokenizer(settings["tokenizer"], eos_token=settings["eos"])
        limit_memory()
        send(answers, {})  # ready
        while True:
            request = requests.get()
            if "text" in request:
                send(answers, encode(encoder, encode_py.Text(**request["text"]), request["most"]))
            else:
                send(answers, probe(guide, **request))
                signal.setitimer(signal.ITIMER_PROF, 0)
    finally:
        os._exit(1)


def encode(encoder: Any, text: Any, most: int | None) -> dict[str, Any]:
    """Return the tokens of a text, or that there are more than `most` of them.

    A text that is probably too long is first counted in pieces. At their ends the count is off by a few tokens, so it
    decides only where it is off by more than that.
    """
    try:
        plain = text.text.replace(text.mark, "") if text.mark else text.text
        if most is not None and len(plain) > 8 * most:
            count, start = 0, 0
            while start < len(plain):
                end = cut(plain, start + PIECE)
                count += len(encoder.encode(plain[start:end]))
                if count > most + most // 16 + 64:
                    return {"more_than": most}
                start = end
        return {"tokens": encoder.ids(text)}
    except BaseException as error:  # a panic of the tokenizer's is no Exception
        return {"error": str(error)[:500]}


def cut(text: str, near: int) -> int:
    """Return where to cut a text: before a line or a word, where there is one."""
    for separator in ("\n", " "):
        found = text.rfind(separator, near - PIECE // 4, near)
        if found > 0:
            return found
    return near


def probe(guide: Any, grammar: str, limits: dict[str, Any], seconds: float, mask_seconds: float) -> dict[str, Any]:
    """Compile a grammar and follow it for some tokens. The answer is empty, or says why it cannot be followed.

    Errors in the grammar itself are left to the compiler in the server, which words them. The process dies of SIGPROF
    after so many seconds of CPU time: a busy machine is no fault of the grammar.
    """
    from llguidance import LLMatcher, LLParserLimits

    signal.setitimer(signal.ITIMER_PROF, seconds)
    matcher = LLMatcher(guide, grammar, log_level=0, limits=LLParserLimits(**limits))
    end, state = time.thread_time() + WALK_SECONDS, 1
    for step in range(WALK):
        begun = time.thread_time()
        mask = int.from_bytes(b"" if matcher.is_error() else matcher.compute_bitmask(), "little")
        if time.thread_time() - begun > mask_seconds:
            return {"error": f"finding the next tokens takes more than {mask_seconds:g} s"}
        if step and matcher.is_error():
            return {"error": matcher.get_error().replace("<non-verbose/>", "").strip()}
        if matcher.is_error() or not mask or time.thread_time() > end:
            break
        state = state * 6364136223846793005 % 2**64
        if not matcher.consume_token(pick(mask, state >> 33)) or matcher.is_stopped():
            break
        matcher.compute_ff_tokens()
    return {}


def pick(mask: int, number: int) -> int:
    """Return one of the set bits of a mask: the first at or above a place that depends on `number`, or the first."""
    place = number % mask.bit_length()
    above = mask >> place << place or mask
    return (above & -above).bit_length() - 1


def load(name: str) -> Any:
    """Return a module of this folder, which as a script this file is not in a package with."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def limit_memory() -> None:
    """Bound what this process may allocate from now on, where the system can, and leave no core behind."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        most = used + MEMORY if hard == resource.RLIM_INFINITY else min(used + MEMORY, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def receive(file: BinaryIO) -> dict[str, Any] | None:
    """Return the next message, None at the end."""
    head = file.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = file.read(length)
    return json.loads(body) if len(body) == length else None


def send(file: BinaryIO, message: dict[str, Any]) -> None:
    body = json.dumps(message, separators=(",", ":")).encode()
    file.write(LENGTH.pack(len(body)) + body)
    file.flush()


if __name__ == "__main__":
    main()
