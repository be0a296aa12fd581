"""The small held-out set that is kept here, so that the models can be evaluated without any download.

`python -m training.held_out WHEELS` makes it anew: beginnings of files and documented functions of the held-out
packages, in held_out.json.xz, with their licences beside it.
"""

import argparse
import json
import lzma
import random
import zipfile
from dataclasses import dataclass
from pathlib import Path

from .chats import prompts
from .functions import Function, functions
from .packages import Package, packages
from .sources import sources

FILE = Path(__file__).with_name("held_out.json.xz")
LICENCES = Path(__file__).with_name("held_out_licences.txt")
CODE, CHATS = 48, 96  # texts of each kind
LONGEST = 3_600  # characters of a file, from its beginning: about 1,024 tokens
SHORTEST = 1_600  # so that there is something to go on from


@dataclass(frozen=True)
class Chat:
    package: str
    asked: str
    answer: str


@dataclass(frozen=True)
class HeldOut:
    code: list[str]
    chats: list[Chat]


def held_out(path: Path = FILE) -> HeldOut:
    stored = json.loads(lzma.decompress(path.read_bytes()))
    return HeldOut([each["text"] for each in stored["code"]], [Chat(**each) for each in stored["chats"]])


def choose(wheels: Path, path: Path = FILE, licences: Path = LICENCES) -> None:
    """As many texts of every package as it has, in turn, until there are enough."""
    code: dict[str, list[dict[str, str]]] = {}
    chats: dict[str, list[dict[str, str]]] = {}
    told = []
    for package in (package for package in packages() if package.held_out):
        files = list(sources(package.wheel(wheels)))
        found = [function for file in files for function in functions(file) if len(function.source) < 1500]
        random.Random(0).shuffle(files)
        random.Random(0).shuffle(found)
        long = [file for file in files if len(file) >= SHORTEST]
        code[package.name] = [{"package": package.name, "text": file[:LONGEST]} for file in long]
        chats[package.name] = [_chat(package, function) for function in found]
        told.append(f"{package.name} {package.version} ({package.licence})\n\n{_licence(package.wheel(wheels))}")
    stored = {"code": _in_turn(code, CODE), "chats": _in_turn(chats, CHATS)}
    path.write_bytes(lzma.compress(json.dumps(stored, ensure_ascii=False).encode()))
    licences.write_text(("\n" + "=" * 80 + "\n\n").join(told), encoding="utf-8")


def _chat(package: Package, function: Function) -> dict[str, str]:
    answer = f"```python\n{function.source}\n```"
    return {"package": package.name, "asked": prompts(function)[0]["content"], "answer": answer}


def _in_turn(by_package: dict[str, list[dict[str, str]]], count: int) -> list[dict[str, str]]:
    longest = max(map(len, by_package.values()))
    turns = (texts[i] for i in range(longest) for texts in by_package.values() if i < len(texts))
    return [text for _, text in zip(range(count), turns, strict=False)]


def _licence(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        files = [name for name in archive.namelist() if ".dist-info/" in name and "LICENSE" in name.upper()]
        return "\n".join(
            archive.read(name).decode("utf-8").strip() + "\n" for name in sorted(files) if _is_text(name)
        )


def _is_text(name: str) -> bool:
    return "AUTHORS" not in name.upper() and not name.endswith("/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheels", type=Path)
    choose(parser.parse_args().wheels)


if __name__ == "__main__":
    main()
