"""JSON values: made of bare text, read, and written so that everyone can read them."""

import ast
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

TEXT = frozenset({"string"})
ANY = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})
DEEPEST = 100  # levels: every reader and writer of JSON has an end somewhere, and some crash there


def json_of(text: str, types: frozenset[str]) -> str:
    """A value that was written as bare text, as JSON. Text that is none of the other types is text, which the tool
    can complain of; where nothing is known of the types, only what looks like an object or an array is one."""
    wanted = {"object", "array"} if types == ANY else types - TEXT
    for read in (_read_json, ast.literal_eval):  # models also write True, None and {'a': 1}
        value = _read(read, text.strip()) if wanted else None
        if value is not None and type_of(json.loads(value)) in wanted:
            return value
    return dumps(text)


def type_of(value: Any) -> str:
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


def dumps(value: Any) -> str:
    """Half a character of two, which JSON can hold and nothing can write, becomes the sign for what is lost."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def loads(text: str) -> Any:
    """A ValueError where it is no JSON, or none that could be written again."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if too_deep(value):
        raise ValueError("it is nested too deeply")
    return json.loads(dumps(value))


def too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        level = [inner for each in level for inner in _inside(each)]
        if not level:
            return False
    return True


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()


def _read(read: Callable[[str], Any], text: str) -> str | None:
    """As JSON, or None where it cannot be."""
    try:
        value = read(text)
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # as mlx-lm has it: 5.0 is an integer too
        return None if too_deep(value) else dumps(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _read_json(text: str) -> Any:
    return json.loads(text, strict=False, parse_constant=_refuse)  # an unescaped line break does no harm


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
