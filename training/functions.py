"""Source file → its documented functions, which chats are made of."""

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from .sources import parse

SPECIAL = ("__init__", "__call__", "__repr__", "__eq__", "__len__", "__getitem__", "__iter__", "__contains__")
FIELD = re.compile(r"\s*(:param|:type|:return|:rtype|:raises|@param|Args:|Parameters|Returns|>>>|\.\. |---|===)")
UNSUITED = re.compile(r"(?i)\b(todo|deprecated|test|see )\b|http|:class:|:meth:|:func:|[{}\\]|\"\"\"")
EMPTY = re.compile(r"^(pass|raise NotImplementedError.*|\.\.\.|return NotImplemented)$")


@dataclass(frozen=True)
class Parameter:
    name: str
    annotation: str  # "" where there is none
    required: bool


@dataclass(frozen=True)
class Function:
    name: str
    parameters: tuple[Parameter, ...]  # without self and cls
    purpose: str  # the first sentence of its docstring
    source: str  # with that sentence for a docstring
    steps: tuple[str, ...]  # what its body does, in a few words each

    @property
    def signature(self) -> str:
        return f"{self.name}({', '.join(parameter.name for parameter in self.parameters)})"


def functions(text: str) -> list[Function]:
    tree, lines = parse(text), text.split("\n")
    if tree is None:
        return []
    return [function for node in _defined(tree) if (function := _function(node, lines)) is not None]


def _defined(block: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """At any depth. Statements only: expressions are most of a tree, and define nothing."""
    for part in ("body", "orelse", "handlers", "finalbody"):
        for statement in getattr(block, part, ()):
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                yield statement
            yield from _defined(statement)


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> Function | None:
    if node.name.startswith("test") or (node.name.startswith("__") and node.name not in SPECIAL):
        return None
    docstring = ast.get_docstring(node, clean=False)
    if not docstring or len(node.body) < 2:
        return None
    purpose = _first_sentence(docstring)
    if not 12 <= len(purpose) <= 220 or len(purpose.split()) < 3 or UNSUITED.search(purpose):
        return None
    if purpose.count("`") % 2 or purpose.endswith('"'):
        return None
    first, last = node.lineno - 1, node.end_lineno or node.lineno
    doc_first, doc_last = node.body[0].lineno - 1, node.body[0].end_lineno or node.body[0].lineno
    if last - first > 70 or last <= doc_last or doc_first <= first:
        return None
    body = lines[doc_last:last]
    code = "\n".join(body).strip()
    if len(code) < 8 or EMPTY.match(code):
        return None
    sentence = " " * node.body[0].col_offset + f'"""{purpose}"""'
    source = textwrap.dedent("\n".join([*lines[first:doc_first], sentence, *body])).strip("\n")
    if len(source) > 2600 or parse(source) is None:
        return None
    return Function(node.name, _parameters(node.args), purpose, source, _steps(node.body[1:]))


def _first_sentence(docstring: str) -> str:
    paragraph = textwrap.dedent(docstring.expandtabs()).strip().split("\n\n")[0]
    told = []
    for line in paragraph.split("\n"):
        if FIELD.match(line):
            break
        told.append(line.strip())
    text = re.sub(r"\s+", " ", " ".join(told)).strip()
    sentence = re.match(r"(.{15,}?[.!?])(\s|$)", text)
    return sentence.group(1) if sentence else text


def _parameters(arguments: ast.arguments) -> tuple[Parameter, ...]:
    plain = [*arguments.posonlyargs, *arguments.args]
    optional = {argument.arg for argument in plain[len(plain) - len(arguments.defaults) :]}
    optional |= {a.arg for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default}
    return tuple(
        Parameter(a.arg, ast.unparse(a.annotation) if a.annotation else "", a.arg not in optional)
        for a in [*plain, *arguments.kwonlyargs]
        if a.arg not in ("self", "cls")
    )


def _steps(body: list[ast.stmt]) -> tuple[str, ...]:
    """What each statement of the body is for, as far as its kind and its names tell."""
    told = [_step(statement) for statement in body]
    return tuple(dict.fromkeys(step for step in told if step))


def _step(statement: ast.stmt) -> str:
    match statement:
        case ast.If(test=test):
            return f"check `{_short(test)}`"
        case ast.For(target=target, iter=iterable) | ast.AsyncFor(target=target, iter=iterable):
            return f"go through `{_short(iterable)}` with `{_short(target)}`"
        case ast.While(test=test):
            return f"repeat while `{_short(test)}`"
        case ast.With(items=items) | ast.AsyncWith(items=items):
            return f"open `{_short(items[0].context_expr)}`"
        case ast.Try(handlers=handlers):
            caught = [_short(handler.type) for handler in handlers if handler.type is not None]
            return f"catch `{caught[0]}`" if caught else "clean up whatever happens"
        case ast.Assign(targets=[target]):
            return f"set `{_short(target)}`"
        case ast.Raise(exc=ast.expr() as error):
            return f"raise `{_short(error.func if isinstance(error, ast.Call) else error)}`"
        case ast.Return(value=ast.expr() as value):
            return f"return `{_short(value)}`"
        case ast.Expr(value=ast.Call(func=called)) | ast.Expr(value=ast.Await(value=ast.Call(func=called))):
            return f"call `{_short(called)}`"
    return ""


def _short(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 40 and "\n" not in text else text[:40].split("(")[0].split("\n")[0].rstrip(" .,[{")
