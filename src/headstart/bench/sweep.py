"""Depths by kinds of text and numbers of rows, in turns in every repeat.

A machine is never twice the same. So all depths of a cell run side by side, by turns of half a second, and what is
compared later are ratios within a repeat.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from ..engine import Engine
from ..errors import RequestError
from ..models import Model
from .imposed import Recording, begin_imposed, check_pattern, record
from .rows import spread
from .run import K, Run, Running, begin, in_turns

FEWEST = 20  # tokens: a round may say nine of them, and the first is not timed
REPEATS = 2  # at least


@dataclass(frozen=True)
class Cell:
    """What a depth is good for depends on these two."""

    kind: str
    rows: int


Runs = dict[Cell, dict[K, list[Run]]]


@dataclass(frozen=True)
class Plan:
    prompts: Mapping[str, Sequence[Sequence[int]]]  # token ids by kind
    rows: Sequence[int] = (1, 4)
    ks: Sequence[K] = (0, 1, 2, 3, "auto")
    tokens: int = 64  # of every row
    repeats: int = 5
    acceptance: Sequence[float] | None = None  # imposed, cumulative by position

    def __post_init__(self) -> None:
        if 0 not in self.ks:
            raise RequestError("--k must hold 0, which the others are compared with")
        if self.repeats < REPEATS:
            raise RequestError(
                f"--repeats is {self.repeats}; {REPEATS} are needed to choose by one and judge by the other"
            )
        if self.tokens < FEWEST:
            raise RequestError(f"--tokens is {self.tokens}; some rounds must fit in: give {FEWEST} or more")
        if not self.rows or min(self.rows) < 1:
            raise RequestError(f"--rows is {', '.join(map(str, self.rows))}; give numbers of 1 or more")
        if self.acceptance is not None:
            check_pattern(self.acceptance)
            if "auto" in self.ks:
                raise RequestError("--acceptance is imposed on fixed depths only: leave auto out of --k")
            if max(self.depths) > len(self.acceptance):
                raise RequestError(
                    f"--acceptance has {len(self.acceptance)} positions and --k goes to {max(self.depths)}: "
                    "give as many positions, or fewer depths"
                )

    @property
    def depths(self) -> list[int]:
        """Those that are fixed."""
        return [k for k in self.ks if k != "auto"]

    @property
    def cells(self) -> list[Cell]:
        return [Cell(kind, rows) for rows in self.rows for kind in self.prompts]

    @property
    def count(self) -> int:
        """Runs, those included that only warm up."""
        return (len(self.rows) + len(self.cells) * self.repeats) * len(self.ks)

    def check(self, model: Model) -> None:
        """Refuse what this model cannot do before anything is measured."""
        if not model.has_head:
            raise RequestError(f"there is no depth to measure: {model.head_unavailable or 'the model has no head'}")
        if max(self.depths) > model.max_k:
            raise RequestError(f"--k goes to {max(self.depths)}, and this model drafts at most {model.max_k} tokens")


def sweep(model: Model, plan: Plan, progress: Callable[[float], None] = lambda runs: None) -> Runs:
    """Every depth of every cell, `plan.repeats` times. `progress` is told of `plan.count` runs in all, by parts.
    Ctrl-C ends it early: whole repeats are kept, if they are enough to compare."""
    plan.check(model)
    rng, recordings = Random(0), dict[Cell, Recording]()

    def begun(cell: Cell, k: K) -> Running:
        prompts = spread(plan.prompts[cell.kind], cell.rows)
        if plan.acceptance is None or k == "auto":
            return begin(model, prompts, k, plan.tokens)
        if cell not in recordings:
            recordings[cell] = record(model, prompts, plan.tokens)
        return begin_imposed(model, recordings[cell], k, plan.acceptance)

    def measure(cell: Cell) -> dict[K, Run]:
        return in_turns({k: begun(cell, k) for k in rng.sample(plan.ks, len(plan.ks))}, progress)

    if "auto" in plan.ks:
        Engine(model, max_rows=max(plan.rows)).warm_up()
    for cell in plan.cells[:: len(plan.prompts)]:  # one of every number of rows, to warm up
        measure(cell)
    runs: Runs = {cell: {k: [] for k in plan.ks} for cell in plan.cells}
    whole = 0  # repeats
    try:
        while whole < plan.repeats:
            for cell in plan.cells:
                for k, done in measure(cell).items():
                    runs[cell][k].append(done)
            whole += 1
    except KeyboardInterrupt:
        if whole < REPEATS:
            raise
        return {cell: {k: done[:whole] for k, done in by_k.items()} for cell, by_k in runs.items()}
    return runs
