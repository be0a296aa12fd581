"""Lines of source by package: `python docs/lines.py`. `code` counts Python without blank lines, comments and
docstrings, `native` all lines of C++, CUDA and Metal, `page` those of the dashboard; data files count nowhere."""

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/headstart"
NATIVE, PAGE = (".cpp", ".h", ".cu", ".cuh", ".metal", ".inc"), (".js", ".css", ".html")


def table() -> str:
    packages = sorted(path for path in SOURCE.iterdir() if (path / "__init__.py").is_file())
    alone = sorted(SOURCE.glob("*.py"))
    rows = [_row(f"`{path.name}/`", _files(path)) for path in packages]
    rows += [_row(f"`{path.name}`", [path]) for path in alone]
    rows.append(_row("in all", [file for path in packages for file in _files(path)] + alone))
    return "| | files | code | native | page | longest |\n| --- | ---: | ---: | ---: | ---: | --- |\n" + "".join(rows)


def _files(package: Path) -> list[Path]:
    """Of our own: what others wrote lies in `vendor`."""
    found = [path for path in sorted(package.rglob("*")) if path.suffix in (".py", *NATIVE, *PAGE)]
    return [path for path in found if "vendor" not in path.parts]


def _row(name: str, files: list[Path]) -> str:
    longest = max(files, key=_lines)
    code = sum(map(_code_lines, files))
    native, page = (sum(_lines(file) for file in files if file.suffix in kind) for kind in (NATIVE, PAGE))
    return f"| {name} | {len(files)} | {code:,} | {native:,} | {page:,} | `{longest.name}`, {_lines(longest)} |\n"


def _code_lines(file: Path) -> int:
    """Return the lines of a Python file without blank lines, comments and docstrings; 0 for other files."""
    if file.suffix != ".py":
        return 0
    source = file.read_text(encoding="utf-8")
    ignored = (
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
    )  # fmt: skip
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in ignored:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        is_scope = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if is_scope and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines -= set(range(docstring.lineno, docstring.end_lineno + 1))
    return len(lines)


def _lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


if __name__ == "__main__":
    print(table(), end="")
