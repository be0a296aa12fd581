"""JSON Schemas of tools, and the JSON values of XML calls, which write them as bare text."""

import ast
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from types import NoneType
from typing import Any

from ...sampling.bounds import resolve_reference

Schema = Mapping[str, Any]
Tools = Mapping[str, Schema]  # by function name: the schema of its arguments
Types = frozenset[str]

STRING = frozenset({"string"})
ANY = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})
MAX_DEPTH = 100  # of nesting: every JSON library has a limit somewhere, and some crash there
_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", NoneType: "null", list: "array"}


@dataclass(frozen=True)
class Permitted:
    """The values that a schema permits: their types, and which strings (None: any)."""

    types: Types = ANY
    strings: frozenset[str] | None = None

    def __and__(self, other: "Permitted") -> "Permitted":
        choices = [each.strings for each in (self, other) if each.strings is not None]
        return Permitted(self.types & other.types, frozenset.intersection(*choices) if choices else None)

    def __or__(self, other: "Permitted") -> "Permitted":
        choices = [each.strings for each in (self, other) if each.types >= STRING]
        known = [each for each in choices if each is not None]
        strings = frozenset[str]().union(*known) if len(known) == len(choices) else None
        return Permitted(self.types | other.types, strings)


def parameter_schema(schema: Schema, key: str) -> Any:
    """Return the schema of one parameter of a tool."""
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    return schema.get("additionalProperties")


def permitted(schema: Any, root: Schema, known: dict[str, Permitted] | None = None, depth: int = 0) -> Permitted:
    """Return the values that a schema within `root` permits; all of them if it does not state types.

    `known` holds the result for each `$ref`, since a small schema can have 2^30 paths to one.
    """
    if not isinstance(schema, Mapping) or depth == MAX_DEPTH:
        return Permitted()
    references = {} if known is None else known

    def within(part: Any) -> Permitted:
        return permitted(part, root, references, depth + 1)

    found = Permitted()
    if isinstance(place := schema.get("$ref"), str):
        if place not in references:
            references[place] = Permitted()  # meanwhile: a schema that refers to itself adds nothing by that
            references[place] = within(resolve_reference(place, root))
        found &= references[place]
    names = schema.get("type")
    if named := ANY.intersection(each for each in as_list(names) or [names] if isinstance(each, str)):
        found &= Permitted(named | {"integer"} if "number" in named else named)
    for word in ("anyOf", "oneOf"):
        if parts := as_list(schema.get(word)):
            found &= reduce(or_, map(within, parts))
    for each in as_list(schema.get("allOf")):
        found &= within(each)
    if values := as_list(schema.get("enum")) or ([schema["const"]] if "const" in schema else []):
        found &= Permitted(frozenset(map(_type, values)), frozenset(v for v in values if isinstance(v, str)))
    return found


def as_list(value: Any) -> list[Any]:
    """Return a list of a schema; nothing if it is something else, since nobody has checked the schema."""
    return value if isinstance(value, list) else []


def to_json(text: str, types: Types) -> str:
    """Return a bare-text value as JSON of one of these types, or else as a string, which the tool can reject.

    If nothing is known of the types, only what looks like an object or an array is read as one.
    """
    wanted = {"object", "array"} if types == ANY else types - STRING
    # An unescaped line break does no harm, and models also write True, None and {'a': 1}.
    for read in (partial(json.loads, strict=False), ast.literal_eval):
        try:
            value = read(text.strip()) if wanted else ""
            if isinstance(value, float) and value.is_integer():
                value = int(value)  # as in mlx-lm: 5.0 is an integer too
            if not nested_too_deeply(value) and _type(json.loads(written := dumps(value))) in wanted:
                return written
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
    return dumps(text)


def dumps(value: Any) -> str:
    """Return JSON that can be encoded: half a surrogate pair becomes U+FFFD."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def loads(text: str) -> Any:
    """Parse JSON that can be written again. Raises ValueError."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if nested_too_deeply(value):
        raise ValueError("it is nested too deeply")
    return json.loads(dumps(value))


def nested_too_deeply(value: Any) -> bool:
    """Return whether a JSON value has more than MAX_DEPTH levels."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for each in level for inner in _children(each)]
        if not level:
            return False
    return True


def _children(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()


def _type(value: Any) -> str:
    return _NAMES.get(type(value), "object")
