"""Find mistakes in the pages without running anything: unknown commands, flags, files, links and headings.

tests/test_docs.py checks every page with it. `check.py` also runs the commands on the pages.
"""

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import typer
from markdown_it import MarkdownIt
from markdown_it.token import Token

from headstart.cli.main import app

ROOT = Path(__file__).parents[1]
NOT_RUN = re.compile(r"<!-- not run: (.+?) -->", re.DOTALL)  # before a block, with the reason
SHELL = ("sh", "console")
A_COMMAND = re.compile(r"\s*(\$ |headstart |python |make |mlx\.launch |pip |curl )")
OPERATOR = re.compile(r"[();<>|&]+")
FILE = re.compile(r"[\w.-]+(/[\w.-]+)*\.(py|cu|h)|[\w.-]+(/[\w.-]+)+\.(md|toml|json)")
FLAG = re.compile(r"--[a-z][a-z0-9-]*")
OTHERS = {"--help", "--backend", "--hostfile"}  # the last two are mlx.launch's


@dataclass(frozen=True)
class Command:
    text: str
    output: str = ""  # what the page shows below it


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    not_run: str | None  # the reason, if it is not run

    @property
    def commands(self) -> list[Command]:
        """Return the commands: in ```console the lines after `$ ` with the output below them, in ```sh every line."""
        found: list[Command] = []
        for line in self.text.replace("\\\n", " ").splitlines():
            if self.language == "sh":
                found += [Command(line)] if line.strip() and not line.lstrip().startswith("#") else []
            elif line.startswith("$ "):
                found.append(Command(line.removeprefix("$ ")))
            elif found:
                found[-1] = Command(found[-1].text, found[-1].output + line + "\n")
        return found


def pages() -> list[Path]:
    """Return all pages but CHANGELOG.md, which also names what no longer exists."""
    own = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
    return [
        *own,
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "examples").rglob("*.md")),
        ROOT / "training/README.md",
    ]


@cache
def tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


def blocks(page: Path) -> Iterator[Block]:
    before = None
    for token in tokens(page):
        if token.type == "fence":
            mark = NOT_RUN.match(before.content) if before and before.type == "html_block" else None
            assert token.map is not None
            yield Block(page, token.map[0] + 1, token.info.strip(), token.content, mark.group(1) if mark else None)
        before = token


def problems(page: Path) -> list[str]:
    """Return what the page names and does not exist, each with its line."""
    found = [f"{page.name}:{block.line}: {problem}" for block in blocks(page) for problem in _in_block(block)]
    for token in tokens(page):
        if token.type == "inline":
            assert token.map is not None
            place = f"{page.name}:{token.map[0] + 1}"
            found += [f"{place}: {problem}" for problem in _in_text(page, token.children or [])]
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src/headstart").rglob("*.py"))
    variables = set(re.findall(r"HEADSTART_[A-Z_]+", page.read_text(encoding="utf-8")))
    return found + [f"{page.name}: nothing reads {name}" for name in sorted(variables) if name not in source]


def _in_block(block: Block) -> Iterator[str]:
    try:
        match block.language:
            case "sh" | "console":
                for command in block.commands:
                    for words in simple_commands(command.text):
                        if problem := _misuse(words):
                            yield f"{command.text.strip()}: {problem}"
            case "python":
                compile(block.text, str(block.page), "exec")
            case "json":
                json.loads(block.text)
            case "toml":
                tomllib.loads(block.text)
            case "" if any(A_COMMAND.match(line) for line in block.text.splitlines()):
                yield "commands belong into ```sh or ```console, so that they are run"
    except (SyntaxError, ValueError) as error:
        yield f"```{block.language}: {error}"


def simple_commands(line: str) -> Iterator[list[str]]:
    """Yield the words of each program that a line of shell calls."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, "|"]:
        if not OPERATOR.fullmatch(word):
            words.append(word)
            continue
        if word.startswith(">") and words and words[-1].isdecimal():  # 2>
            words.pop()
        if words:
            yield words
            words = []


def _misuse(words: list[str]) -> str | None:
    """Return what is wrong with a command, if it is one of ours."""
    programs = [Path(word).name for word in words]
    if "headstart" in programs:
        return _refused(words[programs.index("headstart") + 1 :])
    if programs[0] == "make":
        asked = [word for word in words[1:] if "=" not in word]
        return next((f"no target {name}" for name in asked if name not in _targets()), None)
    if script := next((word for word in words if word.endswith(".py")), None):
        if not (ROOT / script).is_file():
            return f"no file {script}"
        known = (ROOT / script).read_text(encoding="utf-8")
        flags = [word for word in words if word.startswith("--") and word != "--"]
        return next((f"{script} has no {flag}" for flag in flags if flag not in known and flag not in _flags()), None)
    return None


def _refused(words: list[str]) -> str | None:
    """Return the error with which `headstart` would refuse these arguments."""
    commands, (name, *rest) = _headstart().commands, words or ["--help"]
    if name.startswith("-"):
        return None if name in _options(_headstart()) | {"--help"} else f"headstart has no {name}"
    if name not in commands:
        return f"headstart has no command {name}"
    try:
        commands[name].make_context(name, rest)
    except typer.Exit:  # --help
        return None
    except Exception as error:  # click's own, which typer keeps to itself
        return error.format_message() if hasattr(error, "format_message") else repr(error)
    return None


def _in_text(page: Path, parts: list[Token]) -> Iterator[str]:
    for part in parts:
        if part.type in ("link_open", "image"):
            target = str(part.attrs.get("href") or part.attrs.get("src"))
            if not re.match(r"[a-z]+:", target) and (problem := _broken(page, target)):
                yield problem
        elif part.type == "html_inline" and (source := re.search(r'src="([^"]+)"', part.content)):
            if problem := _broken(page, source.group(1)):
                yield problem
        elif part.type == "code_inline":
            yield from _in_code(page, part.content)


def _in_code(page: Path, code: str) -> Iterator[str]:
    """Check what stands between single backticks: a part of a command, a flag, a file."""
    if named := re.match(r"headstart ([a-z][a-z-]*)", code):
        name = named.group(1)
        if name not in _headstart().commands:
            yield f"headstart has no command {name}"
            return
        known = _options(_headstart().commands[name])
        yield from [f"headstart {name} has no {flag}" for flag in FLAG.findall(code) if flag not in known]
    elif A_COMMAND.match(code):
        yield from [f"{code}: {problem}" for words in simple_commands(code) if (problem := _misuse(words))]
    elif FLAG.match(code):
        yield from [f"nothing has {flag}" for flag in FLAG.findall(code) if flag not in _flags() | OTHERS]
    elif FILE.fullmatch(code) and not _is_there(page, code):
        yield f"no file {code}"


def _is_there(page: Path, name: str) -> bool:
    places = (ROOT, ROOT / "src/headstart", page.parent)
    return any((place / name).exists() for place in places) or ("/" not in name and name in _names())


def _broken(page: Path, target: str) -> str | None:
    path, _, anchor = unquote(target).partition("#")
    file = (page.parent / path).resolve() if path else page
    if not file.exists():
        return f"no file {path}"
    return f"no heading #{anchor} in {file.name}" if anchor and anchor not in _anchors(file) else None


@cache
def _anchors(page: Path) -> set[str]:
    """Return the headings of a page as GitHub names them in links."""
    found: set[str] = set()
    for heading, text in zip(tokens(page), tokens(page)[1:], strict=False):
        if heading.type == "heading_open":
            plain = "".join(part.content for part in text.children or [])
            found.add(re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-"))
    return found


@cache
def _headstart() -> Any:
    return typer.main.get_command(app)


def _options(command: Any) -> set[str]:
    return {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}


@cache
def _flags() -> set[str]:
    """Return the flags of every command and script."""
    found = set.union(*[_options(command) for command in (_headstart(), *_headstart().commands.values())])
    for folder in ("bench", "examples", "training", "tests/engine"):
        for path in (ROOT / folder).rglob("*.py"):
            found |= set(FLAG.findall(path.read_text(encoding="utf-8")))
    return found


@cache
def _names() -> set[str]:
    folders = ("src", "tests", "bench", "docs", "examples", "training")
    return {path.name for folder in folders for path in (ROOT / folder).rglob("*.*")}


@cache
def _targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
