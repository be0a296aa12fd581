"""What a tool's JSON Schema says of its parameters, for calls whose values are written as bare text."""

import ast
import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

Schema = Mapping[str, Any]
Tools = Mapping[str, Schema]  # by a function's name: the schema of its arguments

TEXT = frozenset({"string"})
ANY = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})


def parameter(schema: Schema, key: str) -> Any:
    """The schema of one parameter."""
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    return schema.get("additionalProperties")


def types_of(schema: Any, root: Schema, followed: frozenset[str] = frozenset()) -> frozenset[str]:
    """The JSON types that a schema within `root` permits. What says nothing of types permits all of them."""
    if not isinstance(schema, Mapping):
        return ANY
    types = ANY
    if isinstance(place := schema.get("$ref"), str) and place not in followed:
        types &= types_of(_at(place, root), root, followed | {place})
    names = schema.get("type")
    if known := ANY.intersection([names] if isinstance(names, str) else names or ()):
        types &= known | {"integer"} if "number" in known else known
    for word in ("anyOf", "oneOf"):
        if schema.get(word):
            types &= frozenset().union(*[types_of(each, root, followed) for each in schema[word]])
    for each in schema.get("allOf") or ():
        types &= types_of(each, root, followed)
    if "const" in schema or schema.get("enum"):
        types &= {_type(value) for value in schema.get("enum") or [schema["const"]]}
    return types


def json_of(text: str, types: frozenset[str]) -> str:
    """A value that was written as bare text, as JSON. Text that is none of the other types is text, which the tool
    can complain of; where nothing is known of the types, only what looks like an object or an array is one."""
    wanted = {"object", "array"} if types == ANY else types - TEXT
    for read in (_read_json, ast.literal_eval):  # models also write True, None and {'a': 1}
        value = _read(read, text.strip()) if wanted else None
        if value is not None and _type(json.loads(value)) in wanted:
            return value
    return dumps(text)


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _read(read: Callable[[str], Any], text: str) -> str | None:
    """As JSON, or None where it cannot be."""
    try:
        value = read(text)
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # as mlx-lm has it: 5.0 is an integer too
        return dumps(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _read_json(text: str) -> Any:
    return json.loads(text, strict=False, parse_constant=_refuse)  # an unescaped line break does no harm


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _type(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case None:
            return "null"
        case list():
            return "array"
    return "object"


def _at(place: str, root: Schema) -> Any:
    """What `#/$defs/Name` stands for."""
    found: Any = root
    for step in place.removeprefix("#").split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found
