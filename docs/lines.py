"""Lines of source by package, for docs/architecture.md: `python docs/lines.py` prints the table, `--write` puts it
into the page. `code` counts Python without blank lines, comments and docstrings, `lines` counts all of them and the
assets too; data files count nowhere."""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE, PAGE = ROOT / "src/headstart", ROOT / "docs/architecture.md"
PLACE = re.compile(r"(?<=<!-- lines: begin -->\n).*?(?=<!-- lines: end -->)", re.DOTALL)
CODE = (".py", ".cu", ".js", ".css", ".html")


def table() -> str:
    packages = sorted(path for path in SOURCE.iterdir() if (path / "__init__.py").is_file())
    rows = [_row(f"`{path.name}/`", path / "__init__.py", _files(path)) for path in packages]
    alone = sorted(SOURCE.glob("*.py"))
    rows += [_row(f"`{path.name}`", path, [path]) for path in alone]
    everything = [file for path in packages for file in _files(path)] + alone
    code, lines = sum(map(_code_lines, everything)), sum(map(_lines, everything))
    rows.append(f"| in all | | {len(everything)} | {code:,} | {lines:,} | |\n")
    return "| | | files | code | lines | longest |\n| --- | --- | ---: | ---: | ---: | --- |\n" + "".join(rows)


def problems() -> list[str]:
    shown = PLACE.search(PAGE.read_text(encoding="utf-8"))
    if shown is not None and shown.group() == table():
        return []
    return [f"{PAGE.relative_to(ROOT)}: lines of source have changed: `python docs/lines.py --write`"]


def _files(package: Path) -> list[Path]:
    """Of our own: what others wrote lies in `vendor`."""
    return [path for path in sorted(package.rglob("*")) if path.suffix in CODE and "vendor" not in path.parts]


def _row(name: str, about: Path, files: list[Path]) -> str:
    longest = max(files, key=_lines)
    what = (ast.get_docstring(ast.parse(about.read_text(encoding="utf-8"))) or "").split("\n\n")[0].replace("\n", " ")
    longest_file = f"`{longest.name}`, {_lines(longest)}" if len(files) > 1 else ""
    code, lines = sum(map(_code_lines, files)), sum(map(_lines, files))
    return f"| {name} | {what} | {len(files)} | {code:,} | {lines:,} | {longest_file} |\n"


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
    if "--write" in sys.argv[1:]:
        PAGE.write_text(PLACE.sub(lambda _: table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table(), end="")
