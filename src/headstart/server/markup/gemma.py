"""Gemma 4's markup: `<|channel>thought … <channel|>` for reasoning, `<|tool_call>call:name{key:value}<tool_call|>`.

Values are those of JSON but for strings, which stand between `<|"|>`, and keys, which are bare. The markers and the
quote are tokens of their own.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import regex

from .schema import STRING, Permitted, Schema, Tools, as_list, dumps, loads, permitted

THOUGHT = "thought"  # the name of the channel
CHANNEL, CHANNEL_END = "<|channel>", "<channel|>"
GEMMA_CALL, GEMMA_CALL_END = "<|tool_call>", "<tool_call|>"
QUOTE = '<|"|>'
_NAME = regex.compile(r"[\w$.-]{1,64}")  # of a parameter
_KEY = regex.compile(r'([{,]\s*+)([^\s{}\[\],:"]++)\s*+:')


def gemma_arguments(text: str) -> Any:
    """Return the value of a call's arguments; raise a ValueError where they are none."""
    parts = text.split(QUOTE)  # of which every second is a string
    return loads("".join(dumps(part) if n % 2 else _KEY.sub(r'\1"\2":', part) for n, part in enumerate(parts)))


def gemma_functions(tools: Tools, quote: str, as_json: Callable[[Any], str]) -> Iterator[str]:
    """Yield the rules of a grammar for calls of these tools: the schema's parameters, in its order, and all that it
    requires. What is within lists and objects may be anything.

    Args:
        quote: The quote as a grammar has it.
        as_json: Returns the rule of a value of a schema that is no string, list or object.
    """
    if quote.startswith("<["):  # a token, which no text matches
        yield f"string: {quote} /(?s:.*)/ {quote}"
    else:
        yield f"string: {quote} rest"
        yield rf"rest[lazy]: /(?s:.*){regex.escape(QUOTE)}/"
    yield f"value: string | list | object | {as_json({'type': ['number', 'boolean', 'null']})}"
    yield 'list: "[" (value ("," value)*)? "]"'
    yield 'object: "{" (pair ("," pair)*)? "}"'
    yield f'pair: /{_NAME.pattern}/ ":" value'
    for i, (name, schema) in enumerate(tools.items()):
        properties = schema.get("properties")
        found = {key: each for key, each in _items(properties) if _NAME.fullmatch(key)}
        required, known = as_list(schema.get("required")), dict[str, Permitted]()
        for j, (key, each) in enumerate(found.items()):
            yield f"f{i}p{j}: {dumps(key + ':')} {_value(each, schema, known, quote, as_json)}"
        if not found:
            yield f"f{i}: {dumps('call:' + name)} object"
        else:
            yield f"f{i}: {dumps('call:' + name + '{')} {_listed(i, [key in required for key in found])}"


def _items(properties: Any) -> Iterable[tuple[str, Any]]:
    return properties.items() if isinstance(properties, Mapping) else ()


def _listed(number: int, required: list[bool]) -> str:
    """Return the parameters of a function in their order, with commas between those that are there, and a brace."""
    first = next((j for j, needed in enumerate(required) if needed), len(required))
    choices = []
    for begin in range(min(first, len(required) - 1) + 1):  # the first that is there
        rest = [f'("," f{number}p{j})' + "?" * (not required[j]) for j in range(begin + 1, len(required))]
        choices.append(" ".join([f"f{number}p{begin}", *rest]))
    optional = "?" * (first == len(required))
    return f"({' | '.join(choices)}){optional} " + '"}"'


def _value(schema: Any, root: Schema, known: dict[str, Permitted], quote: str, as_json: Callable[[Any], str]) -> str:
    """Return the rule of a value of a schema. Of a string's constraints only a choice of strings is kept."""
    found = permitted(schema, root, known)
    choices = [name for kind, name in (("array", "list"), ("object", "object")) if kind in found.types]
    if found.types >= STRING:
        words = ["string"] if found.strings is None else [f"{quote} {dumps(word)} {quote}" for word in found.strings]
        choices += sorted(words)
    if plain := sorted(found.types - STRING - {"array", "object"}):
        named = {word: root[word] for word in ("$defs", "definitions") if word in root}
        choices.append(as_json(named | {"allOf": [schema, {"type": plain}]}))
    return f"({' | '.join(choices)})" if choices else as_json(schema)
