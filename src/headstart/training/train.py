"""Train a head: let the model write, follow its distribution, measure on what it wrote for other prompts.

Text and training take turns. A token is trained on some PASSES times before there is new text, so at any speed of
either the model writes for a part of the time only.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optimisers
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checkpoint import load_model, load_tokenizer
from ..checkpoint.layout import Layout
from ..checkpoint.quantize import Recipe
from ..errors import HeadError, OutOfMemory
from ..limits import MAX_HEAD_K
from ..models import Model, memory
from .head import new_head, opened_head, trained_parameters
from .loss import WEIGHTS, evaluate, loss_and_gradients
from .store import State, Store, digest, quality, rounded, tokens_per_round
from .text import OwnText, Prompt, Row, batch, own_prompts, padded, read_traffic, shipped_prompts

PASSES = 8  # over the text before there is more
HELD, HELD_ROWS = 16, 4  # texts to measure on, and of a pass
RATE, RATE_WIDTH = 1e-3, 512  # the learning rate of a model so wide; it falls with the root of the width
GENTLY = 0.2  # of it, for a head that has learned already
WARM, COOL = 20, 0.7  # steps until it is reached, and the share of the training after which it falls
MOST_ROWS, STEP_SECONDS = 32, 1.0  # of a step; rows are doubled where a step takes less, and memory allows it
SHARE = 0.8  # of the memory that is left that a step may take
MEASURING, SOONEST = 0.15, 0.03  # share of the time, at most; and of --minutes between two measurements, at least
SAVING = 60.0  # seconds between checkpoints, about
RISE, PATIENCE = 0.005, 0.25  # in tokens a round that count, and the share of the training without them that ends it
USEFUL = 0.3  # of rounds must accept a draft for it to be drafted by default


@dataclass(frozen=True)
class TrainingPlan:
    """The options of a training. `most_steps` ends it as well."""

    layout: Layout
    folder: Path
    minutes: float
    recipe: Recipe
    prompts: Path | None = None
    traffic: Path | None = None
    head: Path | None = None  # to go on from
    most_steps: int | None = None


@dataclass(frozen=True)
class Status:
    """What is shown on the way."""

    doing: str
    seconds: float
    left: float
    text: int  # tokens that the model has written
    trained: int
    measured: Sequence[float]  # seconds, loss, then acceptance by position


class Training:
    def __init__(self, plan: TrainingPlan, report: Callable[[Status], None]):
        self.plan, self.report = plan, report
        about = {
            "model": digest(plan.layout.path.name, [(name, part.shape) for name, part in plan.layout.stored.items()]),
            "--from": str(plan.head), "--prompts": str(plan.prompts), "--from-traffic": str(plan.traffic),
        }  # fmt: skip
        self.prompts, self.held_prompts = self._prompts()
        self.store = Store(plan.folder, plan.layout, about)
        self.frozen: Model = load_model(plan.layout.path, mtp=False)
        self.tokenizer: TokenizerWrapper = load_tokenizer(plan.layout.path)
        self.rows, self.held = self._text()
        self.model = self._head()
        self.parameters: Any = trained_parameters(self.model.weights.mtp)
        rate = RATE * (RATE_WIDTH / int(self.frozen.config["hidden_size"])) ** 0.5
        self.rate = rate if plan.head is None else rate * GENTLY
        self.optimiser = optimisers.AdamW(self.rate, betas=[0.9, 0.95], weight_decay=0.01)
        self.state, restored = State(), self.store.restore()
        if restored is not None:
            self.state, self.parameters, self.optimiser.state = restored
        self.began = time.monotonic() - self.state.seconds
        self.end = plan.minutes * 60
        self.measuring = 0.0

    def _prompts(self) -> tuple[list[Prompt], list[Prompt]]:
        return own_prompts(self.plan.prompts) if self.plan.prompts is not None else shipped_prompts()

    def _text(self) -> tuple[list[Row], list[Row]]:
        if self.plan.traffic is not None:
            rows, held = read_traffic(self.plan.traffic, self.frozen.vocabulary)
            return sorted(rows, key=lambda row: len(row.tokens)), held
        held = self.store.rows("held-out.jsonl")
        if not held:
            held = self.own_text.answer(self.held_prompts[:HELD], seed=None)
            self._require_text(held)
            self.store.add("held-out.jsonl", held)
        return sorted(self.store.rows("text.jsonl"), key=lambda row: len(row.tokens)), held

    @cached_property
    def own_text(self) -> OwnText:
        return OwnText(self.frozen, self.tokenizer)

    def _head(self) -> Model:
        if self.plan.head is None:
            return new_head(self.frozen, self.plan.layout.config, padded(self.held[:HELD_ROWS])[0])
        return opened_head(load_model(self.plan.layout.path, head=self.plan.head), self.plan.layout.config)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def share(self) -> float:
        """Return how much of the training is done."""
        steps = self.state.steps / self.plan.most_steps if self.plan.most_steps else 0.0
        return max(self.seconds / self.end, steps)

    def run(self) -> list[float]:
        """Train until the time is up or acceptance stops rising; write the head and return what is measured of it."""
        if self.plan.head is not None and not self.state.measured:
            self.measure()
        while self.share < 1:
            if self.plan.traffic is None and PASSES * self.written <= self.state.trained:
                self.write()
                continue
            self.step()
            since = self.seconds - (self.state.measured[-1][0] if self.state.measured else 0.0)
            if since > max(self.measuring / MEASURING, self.end * SOONEST):
                self.measure()
                self._shorten()
            elif self.seconds - self.state.seconds > SAVING:
                self.checkpoint()
        self.measure()
        return self.finish()

    @property
    def written(self) -> int:
        return sum(len(row.tokens) for row in self.rows)

    def write(self) -> None:
        """Let the model answer more prompts."""
        self._report("writing text")
        first, width = self.state.asked, self.own_text.width
        asked = [self.prompts[number % len(self.prompts)] for number in range(first, first + width)]
        rows = self.own_text.answer(asked, seed=first)
        self._require_text(rows)
        self.store.add("text.jsonl", rows)
        self.state.asked += width
        self.rows = sorted([*self.rows, *rows], key=lambda row: len(row.tokens))
        self.checkpoint()

    def step(self) -> None:
        """Train on some rows. More of them the next time, where that is quick and there is memory."""
        state = self.state
        tokens, counts = padded(batch(self.rows, state.rows, state.steps))
        before, started = mx.get_active_memory(), time.monotonic()
        mx.reset_peak_memory()
        scale = min(1.0, (state.steps + 1) / WARM) * min(1.0, max(0.02, (1 - self.share) / (1 - COOL)))
        self.optimiser.learning_rate = mx.array(self.rate * scale)
        try:
            _, gradients = loss_and_gradients(self.model, self.frozen, self.parameters, tokens, counts)
            gradients, _ = optimisers.clip_grad_norm(gradients, 1.0)
            updated = self.optimiser.apply_gradients(gradients, self.parameters)
            mx.eval(updated, self.optimiser.state)
        except RuntimeError as error:
            self._shrink(error)
            return
        self.parameters = updated
        self.model.weights.mtp.update(updated)
        state.steps += 1
        state.trained += sum(len(row.tokens) for row in batch(self.rows, state.rows, state.steps - 1))
        took, taken = time.monotonic() - started, mx.get_peak_memory() - before
        if took < STEP_SECONDS and 2 * taken < SHARE * memory.unused() and state.rows < MOST_ROWS:
            state.rows *= 2
        self._report("training")

    def _shrink(self, error: RuntimeError) -> None:
        """Take half as many rows after a step for which memory did not suffice."""
        if "alloc" not in str(error) and "memory" not in str(error):
            raise error
        if self.state.rows == 1:
            raise OutOfMemory("memory does not suffice to train on one text: close other programs") from error
        self.state.rows //= 2
        self.parameters = trained_parameters(self.model.weights.mtp)
        mx.clear_cache()

    def measure(self) -> None:
        """Measure on the held-out text, and write a checkpoint."""
        started = time.monotonic()
        self.model.weights.mtp.update(self.parameters)
        found = [self.seconds, *self._measured()]
        best = self.state.best
        self.state.measured.append(found)
        if best is None or quality(found) > quality(best):
            self.store.save_best(self.parameters)
        self.checkpoint()
        self._report("measured")
        self.measuring = time.monotonic() - started

    def checkpoint(self) -> None:
        self.state.seconds = self.seconds
        self.store.save(self.state, self.parameters, self.optimiser.state)

    def _measured(self) -> list[float]:
        """Return the loss of the first draft, and acceptance by position."""
        rows = sorted(self.held, key=lambda row: len(row.tokens))
        total, chains = mx.zeros((1 + len(WEIGHTS),)), mx.array(0.0)
        for first in range(0, len(rows), HELD_ROWS):
            found = evaluate(self.model, self.frozen, *padded(rows[first : first + HELD_ROWS]))
            total = total + mx.concatenate([found.losses[:1], found.accepted]) * found.chains
            chains = chains + found.chains
            mx.eval(total, chains)
        numbers: Any = (total / chains).tolist()
        return list(numbers)

    def _shorten(self) -> None:
        """End the training soon where acceptance has stopped rising."""
        so_far = self.state.measured
        recent = [each for each in so_far if each[0] > self.seconds * (1 - PATIENCE)]
        earlier = [tokens_per_round(each) for each in so_far if each not in recent]
        if self.share > COOL or len(recent) < 3 or len(earlier) < 6:
            return
        if max(map(tokens_per_round, recent)) < max(earlier) + RISE:
            self.end = min(self.end, self.seconds / COOL)

    def finish(self) -> list[float]:
        """Write the best head, measured after rounding; refuse one that is worse than where it came from."""
        self.model.weights.mtp.update(self.store.best())
        arrays, read = rounded(self.model, self.plan.recipe)
        self.model.weights.mtp.update(read)
        found = [self.seconds, *self._measured()]
        name = self.plan.head
        if name is not None and quality(found) <= quality(first := self.state.measured[0]):
            raise HeadError(
                f"{name}: training did not make it better ({tokens_per_round(first):.3f} tokens a round before, "
                f"{tokens_per_round(found):.3f} after). Nothing was written; give it more --minutes or other text."
            )
        counts = Counter(token for row in (*self.rows, *self.held) for token in row.tokens[row.prompt :])
        self.store.publish(arrays, self._card(found), counts)
        return found

    def _card(self, found: Sequence[float]) -> str:
        useful = [share for share in found[2:] if share >= USEFUL]
        source = "recorded conversations" if self.plan.traffic else self.plan.prompts or "the prompts of Headstart"
        told = f"{self.written} tokens of {self.plan.layout.path.name}, from {getattr(source, 'name', source)}"
        shares = ", ".join(f"{share:.4f}" for share in found[2:])
        return (
            f"num_layers = 1\ndefault_k = {max(1, len(useful))}\nmax_k = {MAX_HEAD_K}\n"
            f"acceptance = [{shares}] # share of rounds that accept so many drafts, greedy, on held-out text\n"
            f"trained_on = {_quoted(told)}\n"
        )

    def _require_text(self, rows: Sequence[Row]) -> None:
        if not rows:
            raise HeadError(f"{self.plan.layout.path}: the model ends every answer at once. Give it other --prompts.")

    def _report(self, doing: str) -> None:
        seconds, share = self.seconds, min(1.0, self.share)
        left = seconds / share * (1 - share) if share else 0.0
        last = self.state.measured[-1] if self.state.measured else []
        self.report(Status(doing, seconds, left, self.written, self.state.trained, last))


def train(plan: TrainingPlan, report: Callable[[Status], None]) -> tuple[list[float], list[float]]:
    """Train a head and write it. Return what was measured first, of a new head after some training, and at the end.

    After Ctrl-C, a kill or a full disk the same plan goes on from the last checkpoint.
    """
    training = Training(plan, report)
    try:
        found = training.run()
    except KeyboardInterrupt:
        training.checkpoint()
        raise
    return training.state.measured[0], found


def _quoted(text: str) -> str:
    """Return a string of TOML."""
    return '"' + text.replace("\\", "/").replace('"', "'") + '"'
