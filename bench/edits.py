"""Texts whose answer repeats a part of the prompt: edited functions, and records extracted as JSON.

The functions are those of the held-out packages (training/held_out.json.xz); each is edited by one of four rules. The
records are made up. Every text is a question and the answer that is imposed on the model, see drafts.py.
"""

import io
import json
import random
import re
import sys
import tokenize
from collections import Counter
from keyword import iskeyword
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
from training.held_out import held_out

TUNED = ("arrow", "boltons", "cookiecutter")  # constants were chosen on these; the other packages are held out
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
