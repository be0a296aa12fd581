"""Texts whose answer repeats a part of the prompt: edited functions, and records extracted as JSON.

The functions are those of the held-out packages (training/held_out.json.xz); each is edited by one of four rules, or
by its authors between two releases, which pip downloads. The records are made up. Every text is a question and the
answer that is imposed on the model, see drafts.py.
"""

import io
import json
import random
import re
import subprocess
import sys
import tempfile
import tokenize
import zipfile
from collections import Counter
from difflib import SequenceMatcher
from keyword import iskeyword
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
from training.functions import functions
from training.held_out import held_out

TUNED = ("arrow", "boltons", "cookiecutter")  # constants were chosen on these; the other packages are held out
RELEASES = {  # of packages that are held out; BSD, MIT or Apache 2.0, BSD
    "invoke": ("2.0.0", "3.0.3"),
    "structlog": ("23.1.0", "26.1.0"),
    "toolz": ("0.11.2", "1.2.0"),
}
CITIES = ("Lisbon", "Uppsala", "Toronto", "Nairobi", "Osaka", "Valparaiso", "Tbilisi", "Hanoi")
PEOPLE = ("Ada Byron", "Grace Murray", "Alan Mathison", "Edsger Wybe", "Barbara Jane", "Donald Ervin", "Radia Joy")
ITEMS = ("desk lamp", "steel kettle", "road bicycle", "wool blanket", "oak bookcase", "rain jacket")


class ImposedText(NamedTuple):
    kind: str
    question: str
    answer: str
    tuned: bool  # constants may have been chosen on it


def edits() -> list[ImposedText]:
    """Return every held-out function that an edit changes, with the edit asked for and made."""
    texts = []
    for number, chat in enumerate(held_out().chats):
        code = chat.answer.removeprefix("```python\n").removesuffix("\n```")
        rules = (_rename, _add_argument, _drop_docstring, _return_early)
        found = rules[number % len(rules)](code)
        if found is not None and found[1] != code:
            asked, edited = found
            question = f"{asked} Write the whole function again.\n\n```python\n{code}\n```"
            texts.append(ImposedText("edit", question, f"```python\n{edited}\n```", chat.package in TUNED))
    return texts


def release_edits() -> list[ImposedText]:
    """Return functions as their authors changed them between two releases: the question has the earlier one."""
    texts = []
    for package, versions in RELEASES.items():
        before, after = (_functions_of(package, version) for version in versions)
        for name in sorted(before.keys() & after.keys()):
            old, new = before[name], after[name]
            if old != new and SequenceMatcher(None, old, new).ratio() > 0.5 and 200 <= len(new) <= 1500:
                question = f"Write this function again as the next release has it.\n\n```python\n{old}\n```"
                texts.append(ImposedText("release", question, f"```python\n{new}\n```", tuned=False))
    random.Random(0).shuffle(texts)
    return texts


def _functions_of(package: str, version: str) -> dict[tuple[str, str], str]:
    """Return the documented functions of a wheel, by file and name, where a name is there once."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*command, "-d", folder, f"{package}=={version}"], check=True)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            files = {name: wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".py")}
    found = [((file, each.name), each.source) for file, text in files.items() for each in functions(text)]
    counts = Counter(name for name, _ in found)
    return {name: source for name, source in found if counts[name] == 1}


def records(count: int = 12) -> list[ImposedText]:
    """Return orders in sentences, and what they say as JSON."""
    texts = []
    for number in range(count):
        rng, lines, extracted = random.Random(number), [], []
        for _ in range(6):
            name, item, city = rng.choice(PEOPLE), rng.choice(ITEMS), rng.choice(CITIES)
            order, price = f"A-{rng.randint(10000, 99999)}", f"{rng.randint(5, 900)}.{rng.randint(0, 99):02}"
            lines.append(f"{name} from {city} ordered a {item} for {price} euros; the order is {order}.")
            extracted.append({"order": order, "customer": name, "city": city, "item": item, "price": float(price)})
        question = "Extract the orders as a JSON list with order, customer, city, item and price.\n\n"
        answer = json.dumps(extracted, indent=2)
        texts.append(ImposedText("json", question + "\n".join(lines), answer, number % 2 == 0))
    return texts


def _rename(code: str) -> tuple[str, str] | None:
    names = Counter(
        token.string
        for token in tokenize.generate_tokens(io.StringIO(code).readline)
        if token.type == tokenize.NAME and not iskeyword(token.string) and token.string not in ("self", "cls", "str")
    )
    name, count = names.most_common(1)[0]
    if count < 2:
        return None
    return f"Rename `{name}` to `{name}_value`.", re.sub(rf"(?<![.\w]){name}\b", f"{name}_value", code)


def _add_argument(code: str) -> tuple[str, str] | None:
    head, colon, body = code.partition(")")
    separator = "" if head.endswith("(") else ", "
    return "Add an argument `strict` that is False by default.", f"{head}{separator}strict=False{colon}{body}"


def _drop_docstring(code: str) -> tuple[str, str] | None:
    return "Remove the docstring.", re.sub(r'\n\s+r?"""(?s:.*?)"""', "", code, count=1)


def _return_early(code: str) -> tuple[str, str] | None:
    found = re.search(r'\n(\s+)r?"""(?s:.*?)"""\n+', code)
    if found is None:
        return None
    indent = found.group(1).replace("\n", "")
    guard = f'{indent}log.debug("called")\n'
    return "Log a debug message first.", code[: found.end()] + guard + code[found.end() :]
