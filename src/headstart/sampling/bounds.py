"""Bounds on what reaches the grammar compiler, and the stack that it gets.

llguidance recurses as deep as a grammar does, through references too, and a stack overflow ends the process. So
grammars are bounded first, and compiled in threads with a large stack. A server also tries every new grammar in a
worker process, on a stack of a quarter of the size: see server/worker.py.
"""

import json
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..errors import RequestError

T = TypeVar("T")

STACK = 256 * 2**20  # bytes of address space: memory is used only as far as a stack reaches
MOST_BYTES = 2**19  # of a grammar's source, also of one made of a client's tools
MOST_NODES = 10_000  # JSON values in a schema, and in the schemas of all tools together
MOST_LEVELS = 1_000  # of a schema's nesting, through its references
MOST_RULES = 4_096  # of a Lark grammar

_RULE = re.compile(r"^\s*[?!]?[A-Za-z_][\w.-]*\s*(?:\[[^\]\n]*\])?\s*:", re.MULTILINE)
_stack_size = threading.Lock()


def check_bounds(kind: str, source: str) -> None:
    """Raise RequestError for a grammar that is too large or too deep to be compiled."""
    if len(source) > MOST_BYTES or len(source.encode(errors="replace")) > MOST_BYTES:
        raise RequestError(f"grammar is larger than {MOST_BYTES:,} bytes: simplify it")
    if kind == "lark" and sum(1 for _ in _RULE.finditer(source)) > MOST_RULES:
        raise RequestError(f"grammar has more than {MOST_RULES:,} rules: simplify it")
    if kind == "json_schema":
        try:
            schema = json.loads(source)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"grammar is no json_schema that can be used: {error}") from error
        if count_nodes(schema) > MOST_NODES:
            raise RequestError(f"grammar is a schema of more than {MOST_NODES:,} values: simplify it")
        if resolved_depth(schema) > MOST_LEVELS:
            message = f"grammar is a schema of more than {MOST_LEVELS:,} levels, with its references: simplify it"
            raise RequestError(message)


def count_nodes(value: Any) -> int:
    """Return the number of values in a JSON value, itself included."""
    count, left = 0, [value]
    while left:
        each = left.pop()
        count += 1
        left.extend(_children(each))
    return count


def resolved_depth(schema: Any) -> int:
    """Return how deep a compiler recurses that follows each reference once, where it first comes upon it."""
    deepest, left, seen = 0, [(schema, 1)], set[str]()
    while left:
        value, depth = left.pop()
        deepest = max(deepest, depth)
        children = list(_children(value, without=("$defs", "definitions")))
        if isinstance(value, Mapping) and isinstance(place := value.get("$ref"), str) and place not in seen:
            seen.add(place)
            children.append(referred(place, schema))
        left.extend((child, depth + 1) for child in reversed(children))
    return deepest


def on_deep_stack(function: Callable[..., T], *arguments: Any) -> T:
    """Return what a function returns in a thread with a large stack."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function(*arguments))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="grammar", daemon=True)
    start_deep(thread)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def start_deep(thread: threading.Thread) -> None:
    """Start a thread with a large stack."""
    with _stack_size:
        usual = threading.stack_size(STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)


def _children(value: Any, without: tuple[str, ...] = ()) -> list[Any]:
    if isinstance(value, Mapping):
        return [each for key, each in value.items() if key not in without]
    return value if isinstance(value, list) else []


def referred(place: str, root: Any) -> Any:
    """Return what a reference within the schema stands for, None where that is nothing."""
    found = root
    for step in place.removeprefix("#").split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found
