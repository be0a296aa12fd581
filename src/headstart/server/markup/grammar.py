"""Grammars for answers that must be a call, and for answers that may be thought about first.

Marks are given as tokens where the tokenizer has them as such, since a grammar's text never matches those. A thought
is counted in tokens too: any but the one that ends it, at most so many. llguidance's own max_tokens would do the
same, but cannot look ahead through drafts and come back.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import regex

from ...errors import RequestError
from ...sampling import GrammarSpec
from ...sampling.grammar import JSON_OPTIONS
from .dialect import Dialect, Thought
from .reader import CALL, CALL_END, THINK, THINK_END
from .schema import Permitted, Schema, Tools, permitted
from .value import TEXT
from .xml_call import FUNCTION

_TERSE = {"whitespace_pattern": " "}  # as templates write the arguments of calls


def call_grammar(tools: Tools, dialect: Dialect, *, several: bool = True) -> GrammarSpec:
    """One call of one of these tools, or `several` in a row, and nothing else."""
    if dialect.format is None:
        raise RequestError("tool_choice asks for a call, and the model's template has none: use 'none' or 'auto'")
    write = _xml_functions if dialect.format == "xml" else _json_functions
    functions = " | ".join(f"f{i}" for i in range(len(tools)))
    start = r'start: call ("\n" call)*' if several else "start: call"
    call = rf'call: {_mark(CALL, dialect)} "\n" ({functions}) "\n" {_mark(CALL_END, dialect)}'
    return GrammarSpec("lark", "\n".join([start, call, *write(tools)]))


def think_first(
    spec: GrammarSpec | None,
    dialect: Dialect,
    thought: Thought,
    *,
    budget: int | None = None,
    calls: bool = True,
) -> GrammarSpec | None:
    """A thought of at most `budget` tokens, in which `calls` may be opened or not, then what `spec` says. Where that
    is None anything may follow, and until the budget is spent the answer may end in the thought, as it may without a
    grammar."""
    if budget is not None and budget < 0:
        raise RequestError(f"the thinking budget is {budget}; it must be 0 or more tokens")
    if not dialect.thinks or thought == "over" or (spec is None and budget is None):
        return spec
    marks = (THINK_END,) if calls else (THINK_END, CALL)
    barred = [dialect.ids[mark] for mark in marks if mark in dialect.ids]
    thinking = _tokens_but(barred, budget)
    opening, end = _mark(THINK, dialect), _mark(THINK_END, dialect)
    if spec is None:
        start = f"{thinking} {end} <[*]>*"
        if budget:
            start = f"({start} | {_tokens_but(barred, budget - 1)})"
        if thought == "open":
            start = f"{opening} {start} | (<[^{dialect.ids[THINK]}]> <[*]>*)?"
        return GrammarSpec("lark", f"start: {start}")
    start = rf'{thinking} {end} "\n\n"'
    if thought == "open":
        start = f"({opening} {start})?"
    return GrammarSpec("lark", f"start: {start} answer\nanswer: {_within_lark(spec)}")


def either(one: GrammarSpec, other: GrammarSpec) -> GrammarSpec:
    """What the one permits, or what the other does."""
    return GrammarSpec("lark", f"start: one | other\none: {_within_lark(one)}\nother: {_within_lark(other)}")


def _tokens_but(barred: list[int], most: int | None) -> str:
    any_other = f"<[^{','.join(map(str, barred))}]>"
    return "" if most == 0 else any_other + ("*" if most is None else f"{{0,{most}}}")


def _within_lark(spec: GrammarSpec) -> str:
    match spec.kind:
        case "lark":
            return f"%lark {{\n{spec.source}\n}}"
        case "regex":
            slashes = regex.sub(r"\\.|/", lambda found: r"\/" if found.group() == "/" else found.group(), spec.source)
            return "/" + slashes.replace("\n", r"\n") + "/"
    return _json(json.loads(spec.source) if spec.kind == "json_schema" else {"type": "object"}, JSON_OPTIONS)


def _json(schema: Any, options: Any = _TERSE) -> str:
    if isinstance(schema, Mapping):
        schema = {**schema, "x-guidance": options}
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def _mark(mark: str, dialect: Dialect) -> str:
    return f"<[{dialect.ids[mark]}]>" if mark in dialect.ids else _literal(mark)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json_functions(tools: Tools) -> Iterator[str]:
    for i, (name, schema) in enumerate(tools.items()):
        head = _literal(f'{{"name": {_literal(name)}, "arguments": ')
        closed = {"additionalProperties": False} if "properties" in schema else {}
        yield f'f{i}: {head} {_json({"type": "object", **closed, **schema})} "}}"'


def _xml_functions(tools: Tools) -> Iterator[str]:
    """Parameters in the order of the schema, only those that it names, and all that it requires."""
    yield r"text[lazy]: /(?s:.*)<\/parameter>/"
    yield r'any: "<parameter=" /[^\s<>]{1,64}/ ">\n" text "\n"'
    for i, (name, schema) in enumerate(tools.items()):
        properties, required = schema.get("properties"), schema.get("required") or ()
        keys = list(properties) if isinstance(properties, Mapping) else []
        parts = " ".join(f"f{i}p{j}" + ("" if key in required else "?") for j, key in enumerate(keys))
        head = _literal(f"{FUNCTION}{name}>\n")
        yield f'f{i}: {head} {parts if properties is not None else "any*"} "</function>"'
        known: dict[str, Permitted] = {}
        for j, key in enumerate(keys):
            value = _xml_value(schema["properties"][key], schema, known)
            yield rf'f{i}p{j}: {_literal(f"<parameter={key}>" + chr(10))} {value} "\n"'


def _xml_value(schema: Any, root: Schema, known: dict[str, Permitted]) -> str:
    """With what ends it. Text goes on to the first end; of its constraints only a choice of texts is kept."""
    found = permitted(schema, root, known)
    ways: list[str] = []
    if found.types >= TEXT:
        if found.texts is None:
            return "text"
        ways += map(_literal, sorted(found.texts))
        schema = {"allOf": [schema, {"type": sorted(found.types - TEXT)}]}  # the rest of it
    if found.types - TEXT:
        named = {word: root[word] for word in ("$defs", "definitions") if word in root}
        ways.append(_json({**named, **schema}))
    return f"({' | '.join(ways)})" + r' "\n</parameter>"'
