"""`python -m training.train_drafter --out FOLDER`: block drafters for a built-in model, on one GPU.

The model generates texts after prompts of the corpus, and drafters of one or more sizes learn to predict them. Every
round has new texts. Training ends when its seconds are spent, and the learning rate is at zero by then. What is
written on the way is of use if the command is stopped.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .drafter import Drafter, DrafterShape, block_loss, load_drafter, read_text, save_drafter, survival
from .export import load
from .model import Net
from .optimiser import Optimiser, Rates
from .own_text import generate
from .rows import Rows
from .shapes import SHAPES
from .tokens import read


@dataclass(frozen=True)
class DrafterRecipe:
    seconds: float = 420.0
    length: int = 384  # tokens of a text, prompt included
    prompt: tuple[int, int] = (16, 192)
    texts: int = 4096  # generated in a round
    passes: int = 3  # over the texts of a round
    rows: int = 96  # texts in a batch
    every: int = 8  # a block begins at every so many positions
    chat: float = 0.5  # share of the texts
    greedy: float = 0.6  # share of the texts; the others are at a temperature up to 1
    decay: float = 5.0
    teacher: float = 0.5
    warm_up: int = 100
    cool_down: float = 0.6  # share of the training in which the learning rate falls
    rates: Rates = field(default_factory=lambda: Rates(muon=0.015, adam=2e-3, weight_decay=0.05))
    held: int = 192  # held-out texts of each kind
    report_every: float = 40.0  # seconds
    seed: int = 1


class DrafterTraining:
    def __init__(self, net: Net, drafters: list[Drafter], recipe: DrafterRecipe, corpus: Path, out: Path):
        torch.manual_seed(recipe.seed)
        torch.set_float32_matmul_precision("high")
        self.net, self.recipe, self.out = net.eval().requires_grad_(False), recipe, out
        self.device = net.model.embed_tokens.weight.device
        self.drafters = [drafter.to(self.device) for drafter in drafters]
        self.optimisers = [Optimiser(drafter, recipe.rates) for drafter in self.drafters]
        self.layers = drafters[0].shape.target_layers
        self.documents = {kind: self._rows(kind, corpus) for kind in ("chat", "code")}
        held = {kind: self._rows(f"held-{kind}", corpus).take(recipe.held).to(self.device) for kind in self.documents}
        self.begun, self.step, self.log = time.monotonic(), 0, list[dict[str, Any]]()
        self.held = {kind: self._generate(rows, greedy=1.0) for kind, rows in held.items()}
        self.note({"head": {kind: self._survival(None, text) for kind, text in self.held.items()}})

    @property
    def progress(self) -> float:
        return (time.monotonic() - self.begun) / self.recipe.seconds

    def run(self) -> None:
        recipe, reported = self.recipe, 0.0
        while self.progress < 1.0:
            chat = round(recipe.texts * recipe.chat)
            rows = [self.documents["chat"].take(chat), self.documents["code"].take(recipe.texts - chat)]
            texts = self._generate(torch.cat(rows).to(self.device), recipe.greedy)
            for _ in range(recipe.passes):
                for batch in texts[torch.randperm(len(texts), device=self.device)].split(recipe.rows):
                    losses = self._one_step(batch)
                    if self.progress >= 1.0:
                        break
                    if time.monotonic() - reported > recipe.report_every:
                        reported = time.monotonic()
                        self.report(losses)
        self.report(losses)

    def _one_step(self, tokens: Tensor) -> list[Tensor]:
        recipe, losses = self.recipe, []
        scale = min(1.0, (self.step + 1) / recipe.warm_up, max(0.0, (1 - self.progress) / recipe.cool_down))
        read = read_text(self.net, tokens, self.layers)
        first = 1 + int(torch.randint(recipe.every, ()))
        for drafter, optimiser in zip(self.drafters, self.optimisers, strict=True):
            starts = self._starts(first, drafter.shape.block_size)
            with self._autocast():
                loss = block_loss(self.net, drafter, tokens, read, starts, recipe.decay, recipe.teacher)
            loss.backward()
            optimiser.step(scale, 0.85 + 0.10 * min(1.0, self.step / 300))
            losses.append(loss.detach())
        self.step += 1
        return losses

    @torch.no_grad()
    def report(self, losses: list[Tensor]) -> None:
        """Log how the drafters do on held-out texts, and write them."""
        for drafter, loss in zip(self.drafters, losses, strict=True):
            found = {kind: self._survival(drafter, text) for kind, text in self.held.items()}
            name = drafter.shape.name
            self.note({"drafter": name, "loss": round(loss.item(), 4), **found})
            save_drafter(drafter, self.out / name)
        told = {"recipe": asdict(self.recipe), "steps": self.step, "log": self.log}
        (self.out / "training.json").write_text(json.dumps(told, indent=1))

    def note(self, what: dict[str, Any]) -> None:
        self.log.append({"step": self.step, "seconds": round(time.monotonic() - self.begun, 1), **what})
        print(json.dumps(self.log[-1]), flush=True)

    def _survival(self, drafter: Drafter | None, tokens: Tensor) -> list[float]:
        k = drafter.shape.block_size - 1 if drafter is not None else 6
        starts = self._starts(self.recipe.prompt[1] + 1, k + 1)
        shares = []
        for batch in tokens.split(self.recipe.rows):
            read = read_text(self.net, batch, self.layers)
            with self._autocast():
                shares.append(len(batch) * survival(self.net, drafter, batch, read, starts, k))
        return [round(share, 3) for share in (sum(shares) / len(tokens)).tolist()]

    def _starts(self, first: int, width: int) -> Tensor:
        return torch.arange(first, self.recipe.length - width + 1, self.recipe.every, device=self.device)

    def _rows(self, kind: str, corpus: Path) -> Rows:
        return Rows(read(kind, corpus), self.recipe.length, whole="chat" in kind, seed=self.recipe.seed)

    def _generate(self, rows: Tensor, greedy: float) -> Tensor:
        prompts = torch.randint(*self.recipe.prompt, (len(rows),), device=self.device)
        heat = torch.rand(len(rows), device=self.device)
        heat = torch.where(torch.rand_like(heat) < greedy, 0.0, heat)
        return generate(self.net, rows, prompts, heat)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("src/headstart/builtin/tiny-qwen3.5"))
    parser.add_argument("--corpus", type=Path, default=Path("training/work/corpus"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, nargs="*", default=[], help="of each drafter to train")
    parser.add_argument("--second-layers", type=int, nargs="*", default=[2], help="of each DFlash2 drafter to train")
    parser.add_argument("--from", type=Path, dest="begin", metavar="FOLDER", help="of drafters to go on from")
    parser.add_argument("--device", default="cuda")
    for name in ("seconds", "texts", "rows", "held"):
        default = getattr(DrafterRecipe, name)
        parser.add_argument(f"--{name}", type=type(default), default=default)
    given = parser.parse_args()
    shape = SHAPES[given.model.name]
    recipe = DrafterRecipe(seconds=given.seconds, texts=given.texts, rows=given.rows, held=given.held)
    given.out.mkdir(parents=True, exist_ok=True)
    shapes = [DrafterShape(shape, layers) for layers in given.layers]
    shapes += [DrafterShape(shape, layers, second=True) for layers in given.second_layers]
    net = load(given.model, shape).to(given.device, torch.bfloat16 if given.device == "cuda" else torch.float32)
    drafters = [load_drafter(given.begin / each.name, each) if given.begin else Drafter(each) for each in shapes]
    DrafterTraining(net, drafters, recipe, given.corpus, given.out).run()


if __name__ == "__main__":
    main()
