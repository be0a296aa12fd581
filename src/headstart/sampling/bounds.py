"""Size limits on grammars, and threads with a stack large enough to compile them.

llguidance recurses as deep as a grammar does, through references too, and a stack overflow ends the process. So
grammars are checked first, and compiled in threads with a large stack. A server also compiles every new grammar in a
worker process first, on a quarter of that stack: see server/worker.py.
"""

import json
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from ..errors import RequestError

T = TypeVar("T")

STACK = 256 * 2**20  # bytes of address space: memory is used only as far as the stack reaches
MAX_BYTES = 2**19  # of a grammar's source, also of one made from a client's tools
MAX_NODES = 10_000  # JSON values in a schema, and in the schemas of all tools together
MAX_LEVELS = 1_000  # nesting of a schema, through its references
MAX_RULES = 4_096  # of a Lark grammar

_GBNF = re.compile(r"^[^\S\n]*root[^\S\n]*::=", re.MULTILINE)
_RULE = re.compile(r"^\s*[?!]?[A-Za-z_][\w.-]*\s*(?:\[[^\]\n]*\])?\s*:", re.MULTILINE)
_stack_size = threading.Lock()


def check_bounds(kind: str, source: str) -> None:
    """Raise RequestError for a grammar that is too large or too deep to be compiled."""
    if len(source) > MAX_BYTES or len(source.encode(errors="replace")) > MAX_BYTES:
        raise RequestError(f"grammar is larger than {MAX_BYTES:,} bytes: simplify it")
    if kind == "lark" and sum(1 for _ in _RULE.finditer(source)) > MAX_RULES:
        raise RequestError(f"grammar has more than {MAX_RULES:,} rules: simplify it")
    if kind == "json_schema":
        try:
            schema = json.loads(source)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"grammar is not a usable json_schema: {error}") from error
        if count_nodes(schema) > MAX_NODES:
            raise RequestError(f"grammar is a schema of more than {MAX_NODES:,} values: simplify it")
        if resolved_depth(schema) > MAX_LEVELS:
            message = f"grammar is a schema of more than {MAX_LEVELS:,} levels, with its references: simplify it"
            raise RequestError(message)


def is_gbnf(source: str) -> bool:
    """Return whether a grammar is in llama.cpp's language, not in Lark's."""
    return _GBNF.search(source) is not None


def count_nodes(value: Any) -> int:
    """Return the number of values in a JSON value, itself included."""
    count, pending = 0, [value]
    while pending:
        count += 1
        pending.extend(_children(pending.pop()))
    return count


def resolved_depth(schema: Any) -> int:
    """Return how deep a compiler recurses that follows each reference once, at its first occurrence."""
    deepest, pending, seen = 0, [(schema, 1)], set[str]()
    while pending:
        value, depth = pending.pop()
        deepest = max(deepest, depth)
        children = _children(value, without=("$defs", "definitions"))
        if isinstance(value, Mapping) and isinstance(place := value.get("$ref"), str) and place not in seen:
            seen.add(place)
            children = [*children, resolve_reference(place, schema)]
        pending.extend((child, depth + 1) for child in reversed(children))
    return deepest


def resolve_reference(place: str, root: Any) -> Any:
    """Return what a `$ref` within the schema refers to, or None if that does not exist."""
    found = root
    for step in place.removeprefix("#").split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def on_deep_stack(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a thread with a large stack, and return its result."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    start_deep(threading.Thread(target=run, name="grammar", daemon=True))
    return future.result()


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
