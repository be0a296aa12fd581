"""Grammars that are too large or too deep are refused before llguidance sees them, which would end the process."""

import json
import threading
from typing import Any

import pytest

from headstart.checkpoint import load_tokenizer, resolve
from headstart.errors import RequestError
from headstart.sampling import GrammarSpec, compile_grammar
from headstart.sampling.bounds import (
    MAX_BYTES,
    MAX_LEVELS,
    MAX_NODES,
    MAX_RULES,
    check_bounds,
    count_nodes,
    on_deep_stack,
    resolved_depth,
)


def chain(links: int) -> dict[str, Any]:
    names = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(links)}
    return {"$defs": {**names, f"d{links}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


LOOP = {"$defs": {"tree": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}}, "$ref": "#/$defs/tree"}


@pytest.mark.parametrize(
    ("schema", "nodes", "depth"),
    [
        (True, 1, 1),
        ({"type": "object"}, 2, 2),
        ({"properties": {"a": {"type": "string"}}}, 4, 4),
        (chain(50), 105, 53),
        (LOOP, 9, 5),
        ({"$ref": "https://example.org/other"}, 2, 2),
        ({"$ref": "#/nothing/here", "x": [1, 2]}, 5, 3),
    ],
    ids=lambda value: str(value)[:30],
)
def test_nodes_and_depth(schema: Any, nodes: int, depth: int) -> None:
    assert (count_nodes(schema), resolved_depth(schema)) == (nodes, depth)


@pytest.mark.parametrize(
    ("kind", "source", "problem"),
    [
        ("json_schema", json.dumps(chain(MAX_LEVELS)), "levels"),
        ("json_schema", json.dumps({"enum": list(range(MAX_NODES))}), "values"),
        ("json_schema", "{", "not a usable json_schema"),
        ("lark", "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(MAX_RULES)), "rules"),
        ("lark", "start: " + "a" * MAX_BYTES, "bytes"),
        ("regex", "é" * (MAX_BYTES // 2 + 1), "bytes"),
    ],
    ids=lambda value: value[:20],
)
def test_what_is_too_large_is_refused(kind: str, source: str, problem: str) -> None:
    with pytest.raises(RequestError, match=f"^grammar .*{problem}"):
        check_bounds(kind, source)


def test_what_fits_is_not() -> None:
    check_bounds("json_schema", json.dumps(chain(MAX_LEVELS // 2)))
    check_bounds("regex", "a" * MAX_BYTES)
    check_bounds("lark", "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(MAX_RULES - 1)))


def test_the_longest_chain_of_rules_is_compiled_on_a_deep_stack() -> None:
    """On an ordinary stack it ends the process, and the worker of these tests with it."""
    rules = "".join(f'r{i}: "a" r{i + 1} | "b"\n' for i in range(MAX_RULES - 2))
    spec = GrammarSpec("lark", f'start: r0\n{rules}r{MAX_RULES - 2}: "z"')
    assert compile_grammar(spec, load_tokenizer(resolve(None)))


def test_a_deep_stack_hands_on_what_comes_of_it() -> None:
    assert on_deep_stack(divmod, 7, 3) == (2, 1)
    with pytest.raises(ZeroDivisionError):
        on_deep_stack(divmod, 7, 0)
    assert threading.stack_size() == 0, "of other threads"
