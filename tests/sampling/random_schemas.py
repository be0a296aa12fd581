"""Random JSON Schemas of the kinds that requests carry, and real ones that a package brings along."""

import json
import random
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

Schema = dict[str, Any]

NAMES = ("name", "path", "size", "tags", "kind", "value", "items", "owner", "created", "is_open", "größe", 'a "b"')
WORDS = ("red", "green", "blue", "redder", "", "a\nb", "0", "naïve", 7, 3.5, True, None)
PATTERNS = (r"^[a-z]{1,6}$", r"^\d{2}-\d{2}$", r"^(cat|dog)s?$", r"^[A-Z]\w{0,3}$", r"^v[0-9]+\.[0-9]$")
FORMATS = ("date", "time", "uuid", "ipv4", "email")


def random_schema(seed: int) -> Schema:
    """An object, an array or, now and then, something smaller."""
    rng = random.Random(seed)
    make = rng.choices([_object, _array, _any], weights=[6, 2, 1])[0]
    return make(rng, 3)


def real_schemas() -> Iterator[tuple[str, Schema]]:
    """Configuration files of well-known tools, from SchemaStore, as check-jsonschema carries them."""
    for file in sorted((files("check_jsonschema") / "builtin_schemas" / "vendor").iterdir(), key=lambda f: f.name):
        if file.name.endswith(".json"):
            yield file.name, json.loads(file.read_text(encoding="utf-8"))


def _any(rng: random.Random, depth: int) -> Schema:
    leaves = [_string, _string, _number, _number, _enum, _constant, _simple]
    return rng.choice(leaves if depth <= 0 else [*leaves, _object, _object, _array, _any_of])(rng, depth)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(0, 4))
    schema: Schema = {"type": "object", "properties": {name: _any(rng, depth - 1) for name in names}}
    if required := [name for name in names if rng.random() < 0.6]:
        schema["required"] = required
    if rng.random() < 0.8:
        schema["additionalProperties"] = False
    elif rng.random() < 0.5:
        schema["additionalProperties"] = _any(rng, 0)
    return schema


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    schema: Schema = {"type": "array", "minItems": least, "maxItems": least + rng.randint(0, 2)}
    if rng.random() < 0.2:
        schema["prefixItems"] = [_any(rng, 0) for _ in range(rng.randint(1, 2))]
    return schema | {"items": _any(rng, depth - 1)}


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randint(2, 3))]}


def _string(rng: random.Random, depth: int) -> Schema:
    how = rng.randrange(4)
    if how == 0:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if how == 1:
        return {"type": "string", "format": rng.choice(FORMATS)}
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 8)}


def _number(rng: random.Random, depth: int) -> Schema:
    low, kind = rng.randint(-1000, 1000), rng.choice(["integer", "number"])
    least, most = (low, low + rng.randint(2, 500)) if kind == "integer" else (low / 8, low / 8 + rng.randint(1, 9))
    return {
        "type": kind,
        rng.choice(["minimum", "exclusiveMinimum"]): least,
        rng.choice(["maximum", "exclusiveMaximum"]): most,
    }


def _enum(rng: random.Random, depth: int) -> Schema:
    return {"enum": rng.sample(WORDS, rng.randint(1, 5))}


def _constant(rng: random.Random, depth: int) -> Schema:
    return {"const": rng.choice([*WORDS, ["a", 1], {"b": None}])}


def _simple(rng: random.Random, depth: int) -> Schema:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}
