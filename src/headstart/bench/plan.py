"""What a benchmark measures, and the loop that measures it.

Variants (depths, or servers in bench/load.py) are compared under conditions (prompts and load). Every repeat measures
each variant once under each condition, in a new order, so that a machine that slows down for a while treats all of
them alike.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, TypeVar

from ..errors import HeadstartError

INTERRUPTED = "interrupted"  # why a run is not complete after Ctrl-C
LoadKind = Literal["batch_size", "concurrency", "rate"]
LOAD_WORDS = {"batch_size": "batch of {:g}", "concurrency": "{:g} at a time", "rate": "{:g} per second"}

T = TypeVar("T")  # one variant, measured once under one condition


@dataclass(frozen=True)
class Condition:
    """Prompts, and the load that they make: sequences decoded together, clients that each wait for their answer, or
    Poisson arrivals per second."""

    prompts: str  # kind of text, or length
    load: LoadKind
    value: float

    @property
    def load_words(self) -> str:
        return LOAD_WORDS[self.load].format(self.value)

    def __str__(self) -> str:
        return f"{self.prompts}, {self.load_words}"


@dataclass(frozen=True)
class BenchPlan:
    """`variants` are depths ("k=0") or names of servers. The first is the baseline of all ratios."""

    variants: Sequence[str]
    prompts: Sequence[str]
    load: LoadKind
    values: Sequence[float]  # of the load
    tokens: int = 64  # per sequence; servers may end an answer earlier
    repeats: int = 3
    sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of SamplingParams; greedy without any

    @property
    def greedy(self) -> bool:
        return not self.sampling.get("temperature")

    @property
    def same_text(self) -> bool:
        """Return whether every variant has the same tokens where rows are computed independently."""
        return self.greedy or "seed" in self.sampling

    @property
    def sampling_words(self) -> str:
        """Return how tokens are chosen."""
        given = ", ".join(f"{name} {value}" for name, value in self.sampling.items())
        return "greedy" + f", {given}" * bool(given) if self.greedy else given

    @property
    def conditions(self) -> list[Condition]:
        return [Condition(prompts, self.load, value) for prompts in self.prompts for value in self.values]

    @property
    def runs(self) -> int:
        """Return the number of runs, including the pass that warms up."""
        return (self.repeats + 1) * len(self.conditions) * len(self.variants)

    def __str__(self) -> str:
        loads = ", ".join(LOAD_WORDS[self.load].format(value) for value in self.values)
        sampled = "" if self.greedy else f", {self.sampling_words}"
        return (
            f"{', '.join(self.variants)} on {', '.join(self.prompts)} prompts, {loads}: {self.runs} runs of "
            f"{self.tokens} tokens per sequence{sampled} ({self.repeats} repeats and one to warm up)"
        )


Trials = dict[Condition, dict[str, dict[int, T]]]  # by variant, then by repeat
Measure = Callable[[str, Condition, int], T]  # of a variant, under a condition, in a repeat


def run_plan(plan: BenchPlan, measure: Measure[T], progress: Callable[[str], None]) -> tuple[Trials[T], str | None]:
    """Return every trial of the plan, and None. Where Ctrl-C or an error ends the run early, return the trials until
    then and the reason.

    `progress` is called before each run with what is about to be measured.
    """
    trials: Trials[T] = {}
    rng = Random(0)
    try:
        for repeat in range(-1, plan.repeats):  # repeat -1 warms up
            for condition in plan.conditions:
                for variant in rng.sample(plan.variants, len(plan.variants)):
                    progress(f"{variant}, {condition}")
                    trial = measure(variant, condition, repeat)
                    if repeat >= 0:
                        trials.setdefault(condition, {}).setdefault(variant, {})[repeat] = trial
    except (KeyboardInterrupt, HeadstartError) as error:
        if not trials:
            raise
        return trials, str(error) if isinstance(error, HeadstartError) else INTERRUPTED
    return trials, None
