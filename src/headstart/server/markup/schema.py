"""What a tool's JSON Schema says of its parameters, for calls whose values are written as bare text."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

from ...sampling.bounds import resolve_reference
from .value import ANY, DEEPEST, TEXT, type_of

Schema = Mapping[str, Any]
Tools = Mapping[str, Schema]  # by a function's name: the schema of its arguments


@dataclass(frozen=True)
class Permitted:
    """The values that a schema permits: their types, and of texts which ones; None for any."""

    types: frozenset[str] = ANY
    texts: frozenset[str] | None = None

    def __and__(self, other: "Permitted") -> "Permitted":
        choices = [each.texts for each in (self, other) if each.texts is not None]
        return Permitted(self.types & other.types, frozenset.intersection(*choices) if choices else None)

    def __or__(self, other: "Permitted") -> "Permitted":
        choices = [each.texts for each in (self, other) if each.types >= TEXT]
        known = [each for each in choices if each is not None]
        texts = frozenset[str]().union(*known) if len(known) == len(choices) else None
        return Permitted(self.types | other.types, texts)


def parameter(schema: Schema, key: str) -> Any:
    """The schema of one parameter."""
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    return schema.get("additionalProperties")


def permitted(schema: Any, root: Schema, known: dict[str, Permitted] | None = None, deep: int = 0) -> Permitted:
    """By a schema within `root`. What says nothing of types permits all of them. `known`: what references stand for,
    each looked up once, since there may be 2^30 ways to it."""
    if not isinstance(schema, Mapping) or deep == DEEPEST:
        return Permitted()
    references = {} if known is None else known

    def within(part: Any) -> Permitted:
        return permitted(part, root, references, deep + 1)

    found = Permitted()
    if isinstance(place := schema.get("$ref"), str):
        if place not in references:
            references[place] = Permitted()  # while it is looked up: what refers to itself says no more by that
            references[place] = within(resolve_reference(place, root))
        found &= references[place]
    names = schema.get("type")
    if named := ANY.intersection([names] if isinstance(names, str) else names or ()):
        found &= Permitted(named | {"integer"} if "number" in named else named)
    for word in ("anyOf", "oneOf"):
        if schema.get(word):
            found &= reduce(or_, map(within, schema[word]))
    for each in schema.get("allOf") or ():
        found &= within(each)
    if "const" in schema or schema.get("enum"):
        values = schema.get("enum") or [schema["const"]]
        found &= Permitted(frozenset(map(type_of, values)), frozenset(v for v in values if isinstance(v, str)))
    return found


def flaw(schema: Any, place: str = "") -> str | None:
    """Why something is no schema, as far as it is read here. Null is the same as nothing."""
    if isinstance(schema, bool):
        return None
    if not isinstance(schema, Mapping):
        return f"{place.removesuffix('.')} should be a schema"
    said = {word: value for word, value in schema.items() if value is not None}
    if not isinstance(names := said.get("type", []), str) and not _is_names(names):
        return f"{place}type should be a name or a list of names"
    if not place and not _is_names(said.get("required", [])):
        return "required should be a list of names"
    if not isinstance(said.get("$ref", ""), str):
        return f"{place}$ref should be a text"
    inner: dict[str, Any] = {}
    for word in ("properties", "$defs", "definitions"):
        if not isinstance(schemas := said.get(word, {}), Mapping):
            return f"{place}{word} should be an object"
        inner |= {f"{place}{word}.{name}.": each for name, each in schemas.items()}
    for word in ("anyOf", "oneOf", "allOf", "enum"):
        if not isinstance(choices := said.get(word, []), list):
            return f"{place}{word} should be a list"
        inner |= {f"{place}{word}[{i}].": each for i, each in enumerate(choices) if word != "enum"}
    return next((found for at, each in inner.items() if (found := flaw(each, at)) is not None), None)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
