"""Render small conversations with chat templates, to find out what that takes: a script, run in a process of its own.

It reads templates from standard input, as a list in JSON, and writes what is wrong with them. The process is killed
with SIGPROF when they take too long. It imports nothing of Headstart, and starts fast.
"""

import json
import signal
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 5.0  # of CPU time for all of it; an ordinary template takes a few milliseconds
MEMORY = 2**28  # bytes beyond what the process takes
CHARACTERS = 2**20  # of a prompt

USER = {"role": "user", "content": "a"}
CALL = {"type": "function", "id": "123456789", "function": {"name": "f", "arguments": {"x": [1, {"y": "z"}]}}}
TURNS = [
    {"role": "system", "content": "b"},
    USER,
    {"role": "assistant", "content": "c", "reasoning_content": "d", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "123456789", "name": "f", "content": "e"},
    {"role": "assistant", "content": "g"},
    USER,
]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]
SCHEMA = {"type": "object", "properties": {"x": {"type": "array", "items": {"type": "object"}}}, "required": ["x"]}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "g", "parameters": SCHEMA}}]
CHATS: list[dict[str, Any]] = [
    {"messages": messages, "tools": tools, "add_generation_prompt": prompted, "enable_thinking": prompted}
    for messages, tools in (([USER], None), (TURNS, None), (TURNS, TOOLS), (PARTS, None))
    for prompted in (True, False)
]
TOKENS = {name: f"<{name}>" for name in ("bos_token", "eos_token", "pad_token", "unk_token")}


class Generation(Extension):
    """The tag that transformers adds."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """Return an environment like that of transformers."""

    def raise_exception(message: str) -> None:
        raise ValueError(message)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = lambda value, ensure_ascii=False, indent=None, separators=None, sort_keys=False: (
        json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    )
    made.globals |= {"raise_exception": raise_exception, "strftime_now": datetime.now().strftime}
    return made


def problem_of(template: str) -> str | None:
    """Return what is wrong with a template; not what it rejects."""
    try:
        compiled = environment().from_string(template)
    except Exception as error:
        return _exhausted(error)
    for chat in CHATS:
        try:
            if sum(map(len, compiled.generate(**TOKENS, **chat))) > CHARACTERS:
                return f"it writes more than {CHARACTERS:,} characters for a conversation of a few words"
        except Exception as error:
            if problem := _exhausted(error):
                return problem
    return None


def _exhausted(error: Exception) -> str | None:
    if isinstance(error, RecursionError):
        return "it recurses without end"
    return "it takes too much memory" if isinstance(error, MemoryError) else None


def limit() -> None:
    """Bound what this process may take from now on, where the system can, and write no core files."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))


if __name__ == "__main__":
    templates = json.load(sys.stdin)
    limit()
    print(next(filter(None, map(problem_of, templates)), ""))
