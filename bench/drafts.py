"""Compare the sources of drafts: automatic depth with all of them, with the head alone, and plain decoding.

    python bench/drafts.py [MODEL] [--kinds edit json prose code chat] [--texts 6] [--repeats 3]

`edit` and `json` are recorded texts that are imposed on the model: functions of held-out packages, edited by rules,
and orders in sentences as JSON. A small model copies badly, so the trunk's logits are replaced by the text's own
tokens at their full cost. The head drafts from the trunk's real hidden states, and accepts fewer drafts than on a
text of the model's own. All other kinds are those of `headstart bench`, generated freely. Everything takes turns, one
sequence at a time, and ratios are taken within a turn.
"""

import io
import json
import random
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from keyword import iskeyword
from statistics import median
from typing import Any

import mlx.core as mx
from harness import Answer, answers, line, options, table, turns

from headstart import load
from headstart.bench.prompts import BenchPrompt, builtin_prompts
from headstart.engine import DepthController, Engine, Stats
from headstart.engine.step_time import time_steps
from headstart.models import Model
from headstart.state import BatchState, PrefixCache
from training.held_out import held_out

TOKENS = 96  # generated freely per prompt
LONGEST = 160  # tokens of a text that are imposed
TUNED = ("arrow", "boltons", "cookiecutter")  # packages that constants were chosen on
CITIES = ("Lisbon", "Uppsala", "Toronto", "Nairobi", "Osaka", "Valparaiso", "Tbilisi", "Hanoi")
PEOPLE = ("Ada Byron", "Grace Murray", "Alan Mathison", "Edsger Wybe", "Barbara Jane", "Donald Ervin", "Radia Joy")
ITEMS = ("desk lamp", "steel kettle", "road bicycle", "wool blanket", "oak bookcase", "rain jacket")
DOCSTRING = r'\n(\s+)r?"""(?s:.*?)"""'


@dataclass(frozen=True, eq=False)
class Imposed(Model):
    """A model whose greedy text is given. For one sequence."""

    text: list[int] = field(default_factory=list)  # prompt and answer
    at: list[mx.array] = field(default_factory=list)  # where the last window begins

    def trunk(self, tokens: mx.array, state: BatchState, certain: int, **given: Any) -> mx.array:
        self.at[:] = [state.lengths]
        return super().trunk(tokens, state, certain, **given)

    def logits(self, hidden: mx.array) -> mx.array:
        logits = super().logits(hidden)
        positions = self.at[0][:, None] + 1 + mx.arange(hidden.shape[1])  # [1, W]
        right = mx.array(self.text + [0] * 16)[mx.minimum(positions, len(self.text) + 15)]
        # The real logits stay part of the computation, and of its cost.
        return mx.where(mx.arange(logits.shape[-1]) == right[..., None], logits + 1e4, logits)


@dataclass(frozen=True)
class Text:
    prompt: list[int]
    answer: list[int]  # imposed; empty where the model writes freely


def edits() -> Iterator[tuple[str, str]]:
    """Yield every held-out function that an edit changes: what is asked for, and the answer."""
    for number, chat in enumerate(held_out().chats):
        code = chat.answer.removeprefix("```python\n").removesuffix("\n```")
        asked, edited = edit(number % 4, code)
        if edited != code and chat.package not in TUNED:
            yield f"{asked} Write the whole function again.\n\n```python\n{code}\n```", f"```python\n{edited}\n```"


def edit(rule: int, code: str) -> tuple[str, str]:
    """Return what a rule asks for, and the function after it."""
    if rule == 0:
        words = tokenize.generate_tokens(io.StringIO(code).readline)
        names = Counter(each.string for each in words if each.type == tokenize.NAME and not iskeyword(each.string))
        name, count = next(item for item in names.most_common() if item[0] not in ("self", "cls", "str"))
        renamed = re.sub(rf"(?<![.\w]){name}\b", f"{name}_value", code) if count > 1 else code
        return f"Rename `{name}` to `{name}_value`.", renamed
    if rule == 1:
        head, colon, body = code.partition(")")
        separator = "" if head.endswith("(") else ", "
        return "Add an argument `strict` that is False by default.", f"{head}{separator}strict=False{colon}{body}"
    if rule == 2:
        return "Remove the docstring.", re.sub(DOCSTRING, "", code, count=1)
    log = lambda found: f'{found[0]}{found[1].strip(chr(10))}log.debug("called")\n'  # noqa: E731
    return "Log a debug message first.", re.sub(rf"{DOCSTRING}\n+", log, code, count=1)


def orders() -> Iterator[tuple[str, str]]:
    """Yield orders in sentences, and what they say as JSON."""
    for number in range(1, 13, 2):
        rng, lines, extracted = random.Random(number), [], []
        for _ in range(6):
            name, item, city = rng.choice(PEOPLE), rng.choice(ITEMS), rng.choice(CITIES)
            order, price = f"A-{rng.randint(10000, 99999)}", f"{rng.randint(5, 900)}.{rng.randint(0, 99):02}"
            lines.append(f"{name} from {city} ordered a {item} for {price} euros; the order is {order}.")
            extracted.append({"order": order, "customer": name, "city": city, "item": item, "price": float(price)})
        question = "Extract the orders as a JSON list with order, customer, city, item and price.\n\n"
        yield question + "\n".join(lines), json.dumps(extracted, indent=2)


def decode(model: Model, depth: DepthController, k: int | str, texts: list[Text]) -> list[Answer]:
    """Answer one text after the other."""
    done = []
    for each in texts:
        fields = {name: getattr(model, name) for name in Model.__dataclass_fields__}
        asked = Imposed(**fields, text=[*each.prompt, *each.answer]) if each.answer else model
        engine = Engine(asked, max_sequences=1, depth=depth, prefix=PrefixCache(0))
        done += answers(engine, [each.prompt], max_tokens=len(each.answer) or TOKENS, k=k)
        if each.answer and done[-1].tokens != each.answer:
            raise SystemExit("the imposed text did not come out")
    return done


def texts_of(kind: str, tokenizer, count: int) -> list[Text]:
    if kind not in ("edit", "json"):
        return [Text(each.tokens(tokenizer), []) for each in builtin_prompts([kind])[:count]]
    found = []
    for question, answer in [*(edits() if kind == "edit" else orders())][:count]:
        prompt = BenchPrompt(messages=({"role": "user", "content": question},)).tokens(tokenizer)
        found.append(Text(prompt, list(tokenizer.encode(answer))[:LONGEST]))
    return found


def main() -> None:
    given = options(__doc__, "model", kinds=["edit", "json", "prose", "code", "chat"], texts=6, repeats=3)
    model, tokenizer = load(given.model)
    alone, times = replace(model, copies=False), time_steps(model, model.max_k, 1, budget=4.0)
    depths = {name: DepthController(model.max_k, model.default_k) for name in ("all", "head", "plain")}
    for depth in depths.values():
        depth.step_time.calibrate(times)
    table("kind", "all ÷ head", "head ÷ plain", "all ÷ plain", "per round: all", "head", "copied", "of")
    for kind in given.kinds:
        texts = texts_of(kind, tokenizer, given.texts)
        runs = {
            "all": partial(decode, model, depths["all"], "auto", texts),
            "head": partial(decode, alone, depths["head"], "auto", texts),
            "plain": partial(decode, alone, depths["plain"], 0, texts),
        }
        found = turns(runs, given.repeats)
        assert len({str([each.tokens for each in done]) for several in found.values() for done in several}) == 1
        spent = {name: [sum(a.times[-1] - a.times[0] for a in done) for done in found[name]] for name in found}
        cells = []
        for slow, fast in (("head", "all"), ("plain", "head"), ("plain", "all")):
            ratios = [a / b for a, b in zip(spent[slow], spent[fast], strict=True)]
            cells.append(f"{median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})")
        every, head = (Stats.of([each.stats for done in found[name] for each in done]) for name in ("all", "head"))
        copied = [every.as_dict()[f"{how}_by_source"]["copy"] // given.repeats for how in ("accepted", "proposed")]
        line(kind, *cells, every.tokens_per_round, head.tokens_per_round, *copied)


if __name__ == "__main__":
    main()
