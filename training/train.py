"""`python -m training.train NAME --corpus FOLDER --out FOLDER`: one of the built-in models, on one GPU.

From nothing, or with `--from CHECKPOINT` from a model that is trained already.

Training ends when its steps are done or its seconds are spent, whichever is first, and the learning rate is at zero
by then. A command that is stopped early (`--stop-after`) leaves its state behind, and the same command goes on.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .export import load, save
from .loss import Weights, joint_loss, loop_loss
from .model import Net
from .optimiser import Optimiser, Rates
from .rows import Rows
from .shapes import SHAPES, Shape
from .tokens import read


@dataclass(frozen=True)
class Stage:
    until: float  # share of the training
    context: int
    rows: int  # in a batch


@dataclass(frozen=True)
class Recipe:
    """The last stage has the whole context that the models claim."""

    steps: int = 6000
    seconds: float = 780.0  # of training in all
    stages: tuple[Stage, ...] = (Stage(0.85, 2048, 48), Stage(1.0, 4096, 24))
    chat: float = 0.4  # share of the rows
    unrolled: int = 6  # drafts in a chain
    chains: int = 4  # a chain of more than one draft starts at every so many positions
    loop_rows: int = 8
    loop_context: int = 512
    loop_periods: tuple[int, int] = (4, 64)  # shortest and longest
    warm_up: int = 150
    decay: float = 0.6  # share of the training in which the learning rate falls
    rates: Rates = field(default_factory=Rates)
    weights: Weights = field(default_factory=Weights)
    seed: int = 1
    log_every: int = 100
    held_rows: int = 16  # of each kind, for the held-out losses

    def stage(self, progress: float) -> int:
        return next(i for i, stage in enumerate(self.stages) if progress < stage.until or i == len(self.stages) - 1)

    def scale(self, step: int, progress: float) -> float:
        """Of the learning rates: up over the first steps, level, then down to zero."""
        return min(1.0, (step + 1) / self.warm_up, max(0.0, (1 - progress) / self.decay))


CONTINUED = Recipe(stages=(Stage(1.0, 4096, 24),), rates=Rates(muon=0.008, adam=1.2e-3), warm_up=50, decay=0.8)


class Training:
    """What a training has come to, and how it goes on."""

    def __init__(
        self,
        shape: Shape,
        recipe: Recipe,
        corpus: Path,
        out: Path,
        device: str,
        compiled: bool,
        begin: Path | None = None,
    ):
        """`begin`: the checkpoint of a trained model to go on from."""
        self.recipe, self.corpus, self.out, self.device = recipe, corpus, out, device
        torch.manual_seed(recipe.seed)
        torch.set_float32_matmul_precision("high")
        self.net = (Net(shape) if begin is None else load(begin, shape)).to(device)
        self.optimiser = Optimiser(self.net, recipe.rates)
        self.loss = torch.compile(self._loss, dynamic=False) if compiled else self._loss
        self.documents = {kind: read(kind, corpus) for kind in ("chat", "code")}
        self.luck = torch.Generator().manual_seed(recipe.seed)
        self.step, self.tokens, self.spent, self.stage = 0, 0, 0.0, 0
        self.log: list[dict[str, Any]] = []
        self.rows = self._rows()
        out.mkdir(parents=True, exist_ok=True)
        if self._kept.exists():
            self._restore()

    @property
    def progress(self) -> float:
        return min(1.0, max(self.step / self.recipe.steps, self.spent / self.recipe.seconds))

    def run(self, stop_after: float) -> bool:
        """Until training is done, or so many seconds have passed → whether it is done."""
        begun, spent = time.monotonic(), self.spent
        while self.progress < 1.0:
            if (elapsed := time.monotonic() - begun) > stop_after:
                self._keep()
                return False
            self.spent = spent + elapsed
            self._one_step()
        return True

    def _one_step(self) -> None:
        recipe = self.recipe
        if (stage := recipe.stage(self.progress)) != self.stage:
            self.stage = stage
            self.rows = self._rows()
        tokens, starts = self._batch(), self._starts()
        loss, parts = self.loss(tokens, starts, *self._loops())
        loss.backward()
        momentum = 0.85 + 0.10 * min(1.0, self.step / 300)
        self.optimiser.step(recipe.scale(self.step, self.progress), momentum)
        self.step += 1
        self.tokens += tokens.shape[0] * recipe.stages[self.stage].context
        if self.step % recipe.log_every == 0 or self.step == 1:
            self._note({"losses": parts.tolist()})

    def _loss(self, tokens: Tensor, starts: Tensor, loops: Tensor, periods: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.device == "cuda"):
            loss, parts = joint_loss(self.net, tokens, starts, self.recipe.unrolled, self.recipe.weights)
            return loss + self.recipe.weights.loops * loop_loss(self.net, loops, periods), parts

    def _rows(self) -> dict[str, Rows]:
        length = self.recipe.stages[self.stage].context + self.recipe.unrolled + 1
        seed = self.recipe.seed + self.stage
        return {
            kind: Rows(documents, length, whole=kind == "chat", seed=seed)
            for kind, documents in self.documents.items()
        }

    def _batch(self) -> Tensor:
        rows = self.recipe.stages[self.stage].rows
        chat = round(rows * self.recipe.chat)
        return torch.cat([self.rows["chat"].take(chat), self.rows["code"].take(rows - chat)]).to(self.device)

    def _starts(self) -> Tensor:
        """Of the chains: one in every stretch of `chains` positions, elsewhere in it in every step."""
        every = self.recipe.chains
        last = self.recipe.stages[self.stage].context - self.recipe.unrolled - every
        first = int(torch.randint(every, (), generator=self.luck))
        return (torch.arange(0, last, every) + first).to(self.device)

    def _loops(self) -> tuple[Tensor, Tensor]:
        """Rows that go round in circles, and the lengths of the circles."""
        recipe = self.recipe
        spans = self.rows["code"].take(recipe.loop_rows)
        periods = torch.randint(*recipe.loop_periods, (recipe.loop_rows,), generator=self.luck)
        around = torch.arange(recipe.loop_context + 1) % periods[:, None]
        return spans.gather(1, around).to(self.device), periods.to(self.device)

    @torch.no_grad()
    def held_out(self) -> dict[str, list[float]]:
        """Losses on held-out text: next token, then drafts 1 .. unrolled."""
        losses, length = {}, self.recipe.stages[-1].context + self.recipe.unrolled + 1
        for kind in ("chat", "code"):
            rows = Rows(read(f"held-{kind}", self.corpus), length, whole=True, seed=0)
            parts = []
            for _ in range(self.recipe.held_rows):
                with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.device == "cuda"):
                    tokens = rows.take(1).to(self.device)
                    parts.append(joint_loss(self.net, tokens, self._starts(), self.recipe.unrolled, Weights())[1])
            losses[kind] = torch.stack(parts).mean(0).tolist()
        return losses

    def finish(self) -> None:
        """Round to the type that is exported, tell how good it is, and write it."""
        with torch.no_grad():
            for weight in self.net.parameters():
                weight.copy_(weight.to(torch.bfloat16).float())
        self._note({"held_out": self.held_out()})
        save(self.net, self.out)
        told = {"steps": self.step, "tokens": self.tokens, "seconds": round(self.spent, 1), "log": self.log}
        told["passes"] = {kind: rows.passes for kind, rows in self.rows.items()}
        (self.out / "training.json").write_text(json.dumps({**told, "recipe": asdict(self.recipe)}, indent=1))

    def _note(self, what: dict[str, Any]) -> None:
        self.log.append({"step": self.step, "tokens": self.tokens, "seconds": round(self.spent, 1), **what})
        print(json.dumps(self.log[-1]), flush=True)

    @property
    def _kept(self) -> Path:
        return self.out / "state.pt"

    def _keep(self) -> None:
        state = {
            "net": self.net.state_dict(),
            "optimiser": self.optimiser.state(),
            "luck": self.luck.get_state(),
            "counts": (self.step, self.tokens, self.spent, self.stage),
            "rows": {kind: (rows.passes, rows.taken) for kind, rows in self.rows.items()},
            "log": self.log,
        }
        torch.save(state, self._kept)

    def _restore(self) -> None:
        state = torch.load(self._kept, map_location=self.device)
        self.net.load_state_dict(state["net"])
        self.optimiser.restore(state["optimiser"])
        self.luck.set_state(state["luck"].cpu())
        self.step, self.tokens, self.spent, self.stage = state["counts"]
        self.log = state["log"]
        self.rows = self._rows()
        for kind, (passes, taken) in state["rows"].items():
            self.rows[kind].resume(passes, taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("--corpus", type=Path, default=Path("training/work/corpus"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--from", type=Path, dest="begin", metavar="CHECKPOINT", help="a trained model to go on from")
    parser.add_argument("--seconds", type=float, default=Recipe.seconds, help="of training in all")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--stop-after", type=float, default=float("inf"), help="seconds of this command")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    recipe = Recipe() if arguments.begin is None else CONTINUED
    training = Training(
        SHAPES[arguments.name],
        replace(recipe, steps=arguments.steps, seconds=arguments.seconds),
        arguments.corpus,
        arguments.out,
        arguments.device,
        compiled=arguments.device == "cuda",
        begin=arguments.begin,
    )
    if training.run(arguments.stop_after):
        training.finish()


if __name__ == "__main__":
    main()
