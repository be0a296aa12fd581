"""Random output with reasoning and tool calls, each with the message that it should be parsed into."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from headstart.server.markup import Delta, Tools, merge

TOOLS: Tools = {
    "write_file": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "text": {"type": "string"},
            "mode": {"type": "integer"},
            "scale": {"type": "number"},
            "force": {"type": "boolean"},
            "owner": {"anyOf": [{"type": "object"}, {"type": "null"}]},
            "lines": {"type": "array"},
        },
    },
    "write": {"type": "object", "properties": {"text": {"type": "string"}}},
    "now": {"type": "object", "properties": {}},
}
WORDS = (
    "the file", "is", "Zürich", "naïve 🙂", "<", "<<", "</", "<b>", "<tool", "<tool_calls>", "</tool_cal", "a<b",
    "<think", "</thin", "<function", "<functions=", "</parameter", "{", '"name"', "x = {1: 2}", "\\n", "日本語",
    "`<tool_`", "\n", "\n\n", "    ", "\t",
)  # fmt: skip
INSIDE = (
    *WORDS,
    "</function>",
    "</tool_call>",
    "<tool_call>",
    "</think>",
    "<function=write>",
    '"',
    "\\",
    "null",
    "}}",
)
NO_CALLS = (
    "<tool_call>,", "<tool_call>\n</tool_call>", "<tool_call>\n{}\n</tool_call>", "<tool_call>{oops}</tool_call>",
    '<tool_call>\n{"name": "writer", "arguments": {"text": "a"}}\n</tool_call>',
    "<tool_call>\n<function=writer>\n<parameter=text>\na\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n<function=write>\ntext\n</function>\n</tool_call>",
)  # fmt: skip
CUT_OFF = (  # before the function is known
    "<tool_call>\n<function=wri",
    '<tool_call>\n{"name": "write", "argum',
)


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """A whole message, made of what was parsed."""

    content: str
    reasoning: str
    calls: tuple[Call, ...]

    @classmethod
    def of(cls, deltas: list[Delta]) -> "Message":
        parts = merge(deltas)
        content, reasoning = ("".join(p.text for p in parts if p.kind == kind) for kind in ("content", "reasoning"))
        calls = [p for p in parts if p.kind in ("tool_call", "arguments")]
        assert [p.kind for p in calls] == ["tool_call", "arguments"] * (len(calls) // 2)
        pairs = zip(calls[::2], calls[1::2], strict=True)
        return cls(content, reasoning, tuple(Call(name.text, arguments.text) for name, arguments in pairs))


@dataclass
class Document:
    text: str = ""
    thinking: bool = False  # begins in a thought
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    @property
    def well_formed(self) -> bool:
        return not any(each in self.text for each in (*NO_CALLS, *CUT_OFF))


def document(rng: Random) -> Document:
    written = Document()
    kind = rng.choice(["none", "begun", "opened"])
    if kind != "none":
        written.thinking = kind == "begun"
        written.text += "" if written.thinking else rng.choice(["<think>", "<think>\n", "\n<think>\n"])
        said = _passage(rng, written, behind_a_mark=True)
        written.reasoning = said.rstrip(" \t\r\n")
        written.text += rng.choice(["</think>", "\n</think>\n\n", " </think>\n"])
    cut = rng.choice(["", "\n\n"]) + rng.choice(CUT_OFF) if rng.random() < 0.2 else ""
    written.content = _passage(rng, written, behind_a_mark=kind != "none", cut=cut)
    return written


def _passage(rng: Random, written: Document, behind_a_mark: bool, cut: str = "") -> str:
    """Text and calls in turn → the generated text. Blanks are lost beside calls, but for the first before a text."""
    said, gap, after_call = "", "", behind_a_mark
    texts = [_text(rng) if rng.random() < 0.5 else None for _ in range(rng.randrange(6))]
    for text in [*texts, f"At last:{cut}"] if cut else texts:
        blanks = rng.choice(["", " ", "\n", "\n\n"])
        written.text += blanks
        if text is None:
            call, name, arguments = _call(rng)
            written.text += call
            written.calls.append((name, arguments))
            gap, after_call = (gap if after_call else blanks), True
            continue
        written.text += text
        said += gap + text if after_call else blanks + text
        gap, after_call = "", False
    return said


def _text(rng: Random) -> str:
    return rng.choice(NO_CALLS) if rng.random() < 0.2 else _words(rng, WORDS).strip(" \t\r\n") or "x"


def _words(rng: Random, words: tuple[str, ...]) -> str:
    return "".join(rng.choice(words) + rng.choice(["", " "]) for _ in range(rng.randrange(8)))


def _call(rng: Random) -> tuple[str, str, dict[str, Any]]:
    name = rng.choice(list(TOOLS))
    make: dict[str, Callable[[], Any]] = {
        "path": lambda: _words(rng, INSIDE),
        "text": lambda: rng.choice(["null", "5", "true", "", "\n", _words(rng, INSIDE)]),
        "mode": lambda: rng.randrange(-(10**20), 10**20),
        "scale": lambda: rng.choice([0.5, -3, 1e-7]),
        "force": lambda: rng.random() < 0.5,
        "owner": lambda: rng.choice([None, {"a": [1, "</tool_call>"]}]),
        "lines": lambda: [_words(rng, INSIDE), None, 1.5],
    }
    arguments = {key: make[key]() for key in TOOLS[name]["properties"] if rng.random() < 0.7}
    if rng.random() < 0.5:
        written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=rng.random() < 0.5)
        return (
            rng.choice([f"<tool_call>\n{written}\n</tool_call>", f"<tool_call>{written}</tool_call>"]),
            name,
            arguments,
        )
    lines = "".join(f"<parameter={key}>\n{_bare(rng, value)}\n</parameter>\n" for key, value in arguments.items())
    function = f"<function={name}>\n{lines}</function>"
    return rng.choice([f"<tool_call>\n{function}\n</tool_call>", function]), name, arguments


def _bare(rng: Random, value: Any) -> str:
    """As Qwen's template writes it, or as models do."""
    if isinstance(value, str):
        return value
    return str(value) if rng.random() < 0.3 else json.dumps(value, ensure_ascii=False)
