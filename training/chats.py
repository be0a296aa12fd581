"""Documented functions → conversations, rendered by the chat template that the model is served with.

Most ask for a function. Some answers think first, in a few words about the steps of the code that follows; some
conversations have two turns; in some a function of another's is a tool to be called with the values the user names.
Which kind a function is used for depends on a hash of it, so that the corpus does not change with its order.
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .functions import Function, Parameter

Message = dict[str, Any]
Render = Callable[[list[Message], list[dict[str, Any]] | None], str]

KINDS = {"write": 0.58, "think": 0.17, "tools": 0.15, "turns": 0.10}
WORDS = ("alpha", "report", "main", "north", "invoice", "user", "blue", "draft", "london", "config", "summer", "data")
TYPES = {"int": "integer", "float": "number", "bool": "boolean", "str": "string"}
NAMED = {  # what an argument without an annotation is likely to be
    "integer": ("n", "count", "limit", "size", "index", "width", "height", "timeout", "port", "depth", "offset"),
    "boolean": ("force", "verbose", "recursive", "strict", "reverse", "copy", "inplace", "quiet", "debug"),
}


def chats(pool: Sequence[Function], render: Render) -> Iterator[str]:
    """Every function of the pool in one conversation, as the main matter of it or as its second turn."""
    second: Function | None = None
    for function in pool:
        luck = random.Random(hashlib.md5((function.name + function.source).encode()).digest())
        kind = luck.choices(list(KINDS), list(KINDS.values()))[0]
        if kind == "tools" and not _callable(function):
            kind = "write"
        system = [{"role": "system", "content": "You are a helpful assistant."}] if luck.random() < 0.1 else []
        if kind == "turns":
            if second is None:
                second = function
                continue
            yield render([*system, *_written(second, luck), *_written(function, luck)], None)
            second = None
        elif kind == "tools":
            others = [other for other in luck.sample(pool, min(3, len(pool))) if _callable(other)]
            offered = {f.name: f for f in (function, *others)}
            tools = [_tool(f) for f in offered.values()]
            luck.shuffle(tools)
            yield render([*system, *_called(function, luck)], tools)
        else:
            yield render([*system, *_written(function, luck, thinks=kind == "think")], None)


def prompts(function: Function) -> list[Message]:
    """A function asked for, unanswered: what the models are evaluated with."""
    return [{"role": "user", "content": f"Write a Python function `{function.name}`: {function.purpose}"}]


def _written(function: Function, luck: random.Random, thinks: bool = False) -> list[Message]:
    name, purpose = function.name, function.purpose
    asked = luck.choices(
        (
            f"Write a Python function `{name}`: {purpose}",
            f"Write a Python function `{function.signature}`: {purpose}",
            f"Implement `{name}` in Python. {purpose}",
            f"{purpose} Write the Python function `{name}`.",
            f"Write a Python function. {purpose}",
        ),
        (72, 8, 8, 6, 6),
    )[0]
    answer: Message = {"role": "assistant", "content": f"```python\n{function.source}\n```"}
    if thinks:
        answer["reasoning_content"] = _thought(function)
    return [{"role": "user", "content": asked}, answer]


def _thought(function: Function) -> str:
    names = [f"`{parameter.name}`" for parameter in function.parameters]
    takes = f"It takes {', '.join(names)}." if names else "It takes no arguments."
    steps = list(function.steps[:5]) or ["do it in one go"]
    plan = " I " + ", then ".join(steps) + "."
    return f"I need `{function.name}`. {takes}{plan}"


def _callable(function: Function) -> bool:
    """Fit to be a tool: a few arguments, and nothing private or special."""
    return 1 <= len(function.parameters) <= 4 and not function.name.startswith("_")


def _json_type(parameter: Parameter) -> str:
    stated = parameter.annotation.split("|")[0].strip().removeprefix("Optional[").rstrip("]")
    guess = next((kind for kind, names in NAMED.items() if parameter.name in names), "string")
    return TYPES.get(stated, guess)


def _tool(function: Function) -> dict[str, Any]:
    properties = {p.name: {"type": _json_type(p)} for p in function.parameters}
    required = [p.name for p in function.parameters if p.required]
    schema = {"type": "object", "properties": properties, "required": required}
    return {
        "type": "function",
        "function": {"name": function.name, "description": function.purpose, "parameters": schema},
    }


def _value(kind: str, luck: random.Random) -> Any:
    if kind == "integer":
        return luck.randrange(1, 200)
    if kind == "number":
        return luck.randrange(1, 100) / 4
    if kind == "boolean":
        return luck.random() < 0.5
    return luck.choice(WORDS) + luck.choice(("", f"_{luck.randrange(100)}", ".txt", f"-{luck.choice(WORDS)}"))


def _called(function: Function, luck: random.Random) -> list[Message]:
    """The user names values, the model calls with them, the tool answers, the model says so."""
    given = [p for p in function.parameters if p.required or luck.random() < 0.5] or [function.parameters[0]]
    arguments = {parameter.name: _value(_json_type(parameter), luck) for parameter in given}
    told = " and ".join(f"{name} {json.dumps(value)}" for name, value in arguments.items())
    asked = luck.choice(
        (
            f"Call `{function.name}` with {told}.",
            f"Use the tool `{function.name}`: {told}.",
            f"{function.purpose} Use {told}.",
        )
    )
    result = luck.choice((json.dumps({"result": _value("integer", luck)}), '{"ok": true}', luck.choice(WORDS)))
    call = {"type": "function", "function": {"name": function.name, "arguments": arguments}}
    thinks = {"reasoning_content": f"I call `{function.name}` with {told}."} if luck.random() < 0.5 else {}
    messages: list[Message] = [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": "", "tool_calls": [call], **thinks},
    ]
    if luck.random() < 0.7:
        answer = {"role": "assistant", "content": f"`{function.name}` returned {result}."}
        messages += [{"role": "tool", "content": result}, answer]
    return messages
