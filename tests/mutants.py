"""Make one mistake at a time in a file and see whether its tests notice: `python tests/mutants.py [FILE …]`.

Without touching a file: the functions that everybody has imported are given the code of a mutant. What no test kills
is printed: a test is missing, or the mistake makes no difference. A mutant may write where it must not and end the
process; that is noticed, and another process goes on after it.
"""

import ast
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

TESTS = {  # the files that should notice
    "sampling.accept": ["sampling/test_verify.py", "sampling/test_exact_by_enumeration.py"],
    "sampling.distribution": ["sampling/test_distribution.py"],
    "state.kv": ["state/test_memories.py", "state/test_capacity.py"],
    "state.recurrent": ["state/test_memories.py"],
}
REACHED = Path(tempfile.gettempdir()) / "headstart-mutant"  # the number of the one that is tried
PATIENCE = 120  # seconds for one test; a mutant that hangs is noticed
COMPARISONS = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
}  # fmt: skip
OPERATIONS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
NAMES = {
    "minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min", "sum": "max", "cumprod": "cumsum",
    "zeros": "ones", "ones": "zeros", "float32": "bfloat16", "int32": "float32", "keys": "values", "values": "keys",
}  # fmt: skip
NOT_CODE = {"annotation", "returns", "decorator_list", "ctx"}


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """What could stand in the place of `node` by mistake."""

    def other(**changes: object) -> ast.AST:
        copy = deepcopy(node)
        for field, value in changes.items():
            setattr(copy, field, value)
        return copy

    match node:
        case ast.Compare(ops=[operator]):
            yield from (other(ops=[instead()]) for instead in COMPARISONS.get(type(operator), ()))
        case ast.BinOp(op=operator) | ast.BoolOp(op=operator) if type(operator) in OPERATIONS:
            yield other(op=OPERATIONS[type(operator)]())
        case ast.UnaryOp(operand=operand):
            yield operand
        case ast.Constant(value=int() | float()):
            yield from (other(value=node.value + 1), other(value=node.value - 1))
        case ast.Attribute(attr=name, ctx=ast.Load()) if name in NAMES:
            yield other(attr=NAMES[name])
        case ast.Name(id=name, ctx=ast.Load()) if name in NAMES:
            yield other(id=NAMES[name])
        case ast.Slice(lower=lower, upper=upper) if lower or upper:
            yield ast.Slice()
        case ast.If() | ast.IfExp():
            yield from (other(test=ast.Constant(truth)) for truth in (True, False))
        case ast.List(elts=elements, ctx=ast.Load()) if len(elements) > 1:
            yield from (other(elts=elements[:i] + elements[i + 1 :]) for i in range(len(elements)))
        case ast.Assign(targets=[ast.Attribute() | ast.Tuple()]) | ast.Expr(value=ast.Call()):
            yield ast.Pass()
        case ast.Call(func=ast.Attribute(attr="astype", value=value)):
            yield value
        case ast.Call(func=ast.Attribute(attr="where"), args=[condition, yes, no]):
            yield other(args=[condition, no, yes])
        case ast.Call(func=ast.Attribute(attr="zeros" | "ones"), args=[shape, _]):
            yield other(args=[shape])


def mutants(tree: ast.Module) -> Iterator[tuple[int, ast.Module]]:
    """The tree with one mistake within a function, and the line of it."""

    def visit(node: ast.AST, within: bool) -> Iterator[tuple[int, ast.Module]]:
        for field, value in ast.iter_fields(node):
            children = value if isinstance(value, list) else [value]
            for at, child in enumerate(children):
                if field in NOT_CODE or not isinstance(child, ast.AST) or isinstance(child, ast.Assert):
                    continue
                for variant in variants(child) if within else ():
                    setattr(
                        node, field, [*children[:at], variant, *children[at + 1 :]] if value is children else variant
                    )
                    yield getattr(child, "lineno", 0) or node.lineno, ast.fix_missing_locations(deepcopy(tree))
                    setattr(node, field, value)
                yield from visit(child, within or isinstance(child, ast.FunctionDef))

    yield from visit(tree, False)


def functions(names: dict[str, Any], file: str, path: str = "") -> Iterator[tuple[str, FunctionType]]:
    """Those that the file itself defines, methods among them."""
    for name, value in names.items():
        value = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if isinstance(value, FunctionType) and value.__code__.co_filename == file:
            yield path + name, value
        elif isinstance(value, type) and value.__module__ == names["__module__" if path else "__name__"]:
            yield from functions(dict(vars(value)), file, f"{path}{name}.")


def code_of(tree: ast.Module, module: ModuleType) -> dict[str, CodeType]:
    file = str(module.__file__)
    names = {"__name__": module.__name__, "__package__": module.__package__}
    exec(compile(tree, file, "exec"), names)
    return {name: function.__code__ for name, function in functions(names, file)}


def noticed(item: pytest.Item) -> bool:
    item._initrequest()  # type: ignore[attr-defined]  # it has been run before
    signal.alarm(PATIENCE)
    reports = runtestprotocol(item, log=False, nextitem=None)
    signal.alarm(0)
    return any(report.failed for report in reports)


def survivors(name: str, items: list[pytest.Item], first: int) -> None:
    module = import_module(f"headstart.{name}")
    source, own = Path(str(module.__file__)).read_text(), dict(functions(vars(module), str(module.__file__)))
    seconds = {}
    for item in items:
        start = time.perf_counter()
        assert not noticed(item), f"{item.nodeid} fails without a mutant"
        seconds[item] = time.perf_counter() - start
    items = sorted(items, key=seconds.__getitem__)
    tried, alive, plain = 0, 0, ast.unparse(ast.parse(source)).splitlines()
    for number, (line, tree) in enumerate(mutants(ast.parse(source))):
        if number < first:
            continue
        REACHED.write_text(str(number))
        text = ast.unparse(tree)
        tried += 1
        original = {name: function.__code__ for name, function in own.items()}
        for function, code in code_of(tree, module).items():
            own[function].__code__ = code
        killer = next((item for item in items if noticed(item)), None)
        for function, code in original.items():
            own[function].__code__ = code
        if killer is not None:  # it is likely to kill the next one too
            items = [killer, *(item for item in items if item is not killer)]
            continue
        alive += 1
        changed = next(now for was, now in zip(plain, text.splitlines(), strict=False) if was != now)
        print(f"{name}:{line}  {changed.strip()}", flush=True)
    print(f"{name}: {tried} mutants, {tried - alive} killed, {alive} alive", flush=True)
    assert not any(noticed(item) for item in items), "a mutant has left something behind"


class InsteadOfTests:
    def __init__(self, name: str, first: int):
        self.name, self.first = name, first

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        survivors(self.name, session.items, self.first)
        return True


def out_of_patience(*_: object) -> None:
    raise TimeoutError


def try_from(name: str, first: int) -> int:
    signal.signal(signal.SIGALRM, out_of_patience)
    files = [str(Path(__file__).parent / test) for test in TESTS[name]]
    return pytest.main(["-q", "-s", "-p", "no:cacheprovider", *files], plugins=[InsteadOfTests(name, first)])


def main() -> None:
    for name in sys.argv[1:] or TESTS:
        first = 0
        while subprocess.run([sys.executable, __file__, name, "--from", str(first)]).returncode < 0:
            first = int(REACHED.read_text()) + 1
            print(f"{name}: mutant {first - 1} ended the process", flush=True)


if __name__ == "__main__":
    if "--from" in sys.argv:
        sys.exit(try_from(sys.argv[1], int(sys.argv[3])))
    main()
