"""Would it pay to stop drafting where the head is unsure? Simulated on recorded texts of the built-in model.

    python bench/unsure.py [--recording FILE] [--texts 5]

Records at every token of a text how many of eight drafts match what follows, and the head's largest probability for
each; times a plain step, a verified position, a draft, and a wait for a draft's probability between two passes of the
head. Then simulates one sequence: automatic depth as it is, and a rule that after each draft goes on while the chance
that all so far are right (the product of the probabilities) earns what another draft costs. The rule's constant is
chosen on half of the texts; the figures are those of the other half. A recording that exists is used again.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from drafts import Imposed
from edits import edits, records

from headstart import load
from headstart.bench.prompts import builtin_prompts
from headstart.engine.draft import Source, head_drafts
from headstart.engine.draft_history import DraftHistory
from headstart.engine.step import prefill_prompts, step, verify
from headstart.limits import MAX_K
from headstart.models import Model
from headstart.sampling import Proposal

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engine"))
from simulator import Clock, calibrated

KINDS = ("edit", "json", "prose", "code", "chat")
TOKENS = 112  # of each text
CONSTANTS = (0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.5, 3.0)
WAITS = (0.0, 0.02, 0.05)  # of a plain step, besides the measured one
Text = list[tuple[int, list[float]]]  # by token: drafts that match what follows, and the head's largest probabilities
Costs = tuple[float, float, float]  # of a verified position, a draft, a wait, in plain steps


@dataclass(frozen=True, eq=False)
class Observed(Imposed):
    """A model that notes the head's largest probability for every draft, and may wait for each; for one sequence."""

    probabilities: list[mx.array] = field(default_factory=list)
    waits: bool = False

    def logits(self, hidden: mx.array) -> mx.array:
        return super().logits(hidden) if self.text else Model.logits(self, hidden)

    def draft_logits(self, hidden: mx.array, *rest: Any, **more: Any) -> mx.array:
        logits = super().draft_logits(hidden, *rest, **more)
        scores = logits.astype(mx.float32)
        self.probabilities.append(mx.exp(scores.max() - mx.logsumexp(scores)))
        if self.waits:
            self.probabilities[-1].item()
        return logits


def observed(model: Model, text: Sequence[int] = (), *, waits: bool = False) -> Observed:
    fields = {name: getattr(model, name) for name in Model.__dataclass_fields__}
    return Observed(**fields, text=list(text), waits=waits)


def record(model: Observed, prompt: list[int], tokens: int, end: Collection[int]) -> Text:
    batch, found, said = prefill_prompts(model, [prompt], MAX_K), [], []
    while len(said) < tokens and not (said and said[-1] in end):
        model.probabilities.clear()
        proposal = head_drafts(model, batch, MAX_K)
        result = verify(model, batch, Proposal(proposal.tokens[:, :0], []))  # every token is a round of its own
        mx.eval(result.tokens, batch.arrays())
        said.append(int(result.tokens.item()))
        found.append((proposal.tokens[0].tolist(), [round(each.item(), 3) for each in model.probabilities]))
    text = []
    for at, (drafts, probabilities) in enumerate(found):
        pairs = zip(drafts, said[at:], strict=False)
        matching = next((n for n, (a, b) in enumerate(pairs) if a != b), min(MAX_K, len(said) - at))
        text.append((matching, probabilities))
    return text


def recordings(texts: int) -> list[tuple[str, bool, Text]]:
    """Return kind, whether the constant is chosen on it, and what was recorded of each text."""
    model, tokenizer = load()
    made: list[tuple[str, bool, Text]] = []
    for each in [*edits(), *records()]:
        chat = [{"role": "user", "content": each.question}]
        prompt = list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, enable_thinking=False))
        answer = list(tokenizer.encode(each.answer))[:TOKENS]
        if sum((each.kind, each.tuned) == made_of[:2] for made_of in made) < texts:
            imposed = observed(model, [*prompt, *answer])
            made.append((each.kind, each.tuned, record(imposed, prompt, len(answer), ())))
    for number, each in enumerate(builtin_prompts(["prose", "code", "chat"])):
        text = record(observed(model), each.tokens(tokenizer), TOKENS, tokenizer.eos_token_ids)
        made.append((each.kind, number % 2 == 0, text))
    return made


def measure(clock: Callable[[], float], turns: int = 25) -> Costs:
    """Return the costs on this machine: medians of ratios within a turn."""
    model = load()[0]
    batch = prefill_prompts(model, [[3, 5, 7, 11, 13, 17, 19, 23]], MAX_K)

    ahead, waiting = (observed(model, waits=waits) for waits in (False, True))

    def stepped(model: Model, k: int, copied: bool = False) -> None:
        how = {"source": Source.NONE, "distances": [1]} if copied else {}
        mx.eval(step(model, batch, k, **how).tokens, batch.arrays())

    found = []
    for _ in range(turns):
        seconds = []
        for how in ((model, 0), (model, 3, True), (ahead, 3), (waiting, 3)):
            stepped(*how)  # also finishes what the step before left over
            started = clock()
            stepped(*how)
            seconds.append(clock() - started)
        found.append([(b - a) / 3 / seconds[0] for a, b in pairwise(seconds)])
    position, passes, wait = (statistics.median(column) for column in zip(*found, strict=True))
    return position, passes, wait


def automatic(texts: Sequence[Text], costs: Costs, seed: int) -> float:
    """Return the tokens per plain step of the depth controller, once it has seen the texts."""
    clock, (position, passes, _) = Clock(random.Random(seed), busy=False), costs
    depth = calibrated(lambda rows, k, round: 1 + (position + passes) * k, clock)
    for _ in range(2):
        tokens, spent = 0, 0.0
        for text in texts:
            history, at = DraftHistory(), 0
            while at < len(text):
                k = depth.choose([history]).k
                accepted, seconds = min(k, text[at][0]), 1 + (position + passes) * k
                depth.observe([history], k, [(accepted, k)], clock.measure(seconds) if at else None)
                at, spent = at + accepted + 1, spent + seconds
            tokens += len(text)
    return tokens / spent


def stopping(texts: Sequence[Text], costs: Costs, constant: float) -> float:
    """Return the tokens per plain step of a rule that stops where the head is unsure."""
    tokens, spent, (position, passes, wait) = 0, 0.0, costs
    for text in texts:
        at = 0
        while at < len(text):
            matching, probabilities = text[at]
            drafted, verified, right = 0, 0, 1.0
            while drafted < MAX_K and (not drafted or right > constant * (position + passes)):
                right *= probabilities[drafted]
                drafted += 1
                verified = drafted if right > constant * position else verified
            at += min(verified, matching) + 1
            spent += 1 + position * verified + (passes + wait) * drafted
        tokens += len(text)
    return tokens / spent


def foretold(texts: Sequence[Text], held_out: Sequence[Text], late: int) -> list[float]:
    """Return how much of the variance of a round's matching drafts is foretold, for rounds of three drafts: by
    earlier acceptance; by that and the probabilities of the round `late` rounds before; or of the round itself."""

    def rows(several: Sequence[Text]) -> list[np.ndarray]:
        lines = []
        for text in several:
            at, rate, before = 0, 1.5, []
            while at < len(text):
                matching, probabilities = text[at]
                logs = np.log(np.maximum(np.cumprod(probabilities[:3]), 1e-3))
                if len(before) >= late:
                    lines.append(([1.0, before[-late][0]], *before[-late][1:], list(logs), matching))
                accepted = min(3, matching)
                rate = 0.9 * rate + 0.1 * accepted
                before.append((rate, [accepted, *logs]))
                at += accepted + 1
        first, earlier, own, matching = zip(*lines, strict=True)
        more = [[a + b for a, b in zip(first, each, strict=True)] for each in (earlier, own)]
        return [np.array(each) for each in (first, *more, matching)]

    (*fitted, right), (*tested, truth) = rows(texts), rows(held_out)
    shares = []
    for x, y in zip(fitted, tested, strict=True):
        off = truth - y @ np.linalg.lstsq(x, right, rcond=None)[0]
        shares.append(1 - float((off**2).sum() / ((truth - truth.mean()) ** 2).sum()))
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recording", type=Path)
    parser.add_argument("--texts", type=int, default=5, help="of edits and records, for either half")
    arguments = parser.parse_args()
    if arguments.recording is not None and arguments.recording.exists():
        made = json.loads(arguments.recording.read_text())
    else:
        made = recordings(arguments.texts)
        if arguments.recording is not None:
            arguments.recording.write_text(json.dumps(made))

    def each_kind(rate: Callable[[Sequence[Text]], float], tuned: bool = False) -> list[float]:
        return [rate([text for at, how, text in made if (at, how) == (kind, tuned)]) for kind in KINDS]

    def show(name: str, found: list[float]) -> None:
        rounded = " | ".join(f"{a / b:.2f}" for a, b in zip(found, ours, strict=True))
        print(f"| {name} | {rounded} | {statistics.geometric_mean(found) / statistics.geometric_mean(ours):.3f} |")

    (position, passes, measured), (*_, work) = measure(time.perf_counter), measure(time.process_time)
    print(f"In plain steps: a position {position:.2f}, a draft {passes:.2f}, a wait {measured:.2f}", end="")
    print(f" ({work:.2f} of its processor time).\n")
    print(f"| tokens per second ÷ automatic depth | {' | '.join(KINDS)} | all |\n|{' --- |' * (2 + len(KINDS))}")
    costs = (position, passes, 0.0)
    ours = each_kind(lambda texts: statistics.mean(automatic(texts, costs, seed) for seed in range(6)))
    for wait in (*WAITS, measured):

        def rule(constant: float, tuned: bool, wait: float = wait) -> list[float]:
            return each_kind(lambda texts: stopping(texts, (position, passes, wait), constant), tuned)

        best = max(CONSTANTS, key=lambda constant: statistics.geometric_mean(rule(constant, tuned=True)))
        show(f"stopping, a wait costs {wait:.2f}", rule(best, tuned=False))
    halves = [[text for _, how, text in made if how == tuned] for tuned in (True, False)]
    for late in (1, 2):
        shares = ", ".join(f"{share:.2f}" for share in foretold(*halves, late))
        print(f"\nVariance foretold by acceptance, with probabilities {late} rounds before, with its own: {shares}")


if __name__ == "__main__":
    main()
