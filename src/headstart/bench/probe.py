"""Is a model's head right, and does it pay on this machine? Everything that `headstart probe` finds out."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..engine.exact import rows_are_independent
from ..errors import RequestError
from ..models import Model
from .cost import Cost, measure_costs
from .faults import Count, Fault, find_faults
from .identity import Divergence, Run, decode, divergences
from .kernels import kernels_in_use
from .prompts import KINDS, builtin_prompts
from .reading import largest_shift, read

TOKENS = 40  # where the user does not say
FEWEST = 16  # tokens that may be asked for: fewer say nothing about a head
ROUNDING = 2.0  # times the largest shift that was measured, a shift may be to be called rounding
NO_ROUNDING = 1.0  # what is called rounding at most, in logits: a factor of e in probability is a mistake
REPEATS = 2  # of the clock, after one to warm up
SHORT = 8  # tokens that a row has read when its steps are timed

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Probe:
    """What was measured. What follows from it is computed."""

    prompts: list[str]
    tokens: int
    exact: bool  # the kernels compute a row whatever stands beside it, so the same tokens are promised
    runs: list[Run]  # plain decoding, k = 1, 2, …, auto
    rounding: float  # the largest shift between two logits that rounding made on these texts
    first_drafts: Count
    faults: list[Fault]
    costs: list[Cost]  # of one row, k = 0, 1, …
    kernels: dict[str, str]  # by what they compute

    @cached_property
    def divergences(self) -> list[Divergence]:
        plain, *others = self.runs
        return [each for run in others for each in divergences(plain, run)]

    @property
    def identical(self) -> bool:
        return not self.divergences

    @property
    def collapsed(self) -> bool:
        return self.first_drafts.collapsed

    @property
    def passed(self) -> bool:
        """Nothing is wrong with the head, and what it makes the model say is the model's own. Where the same tokens
        are not promised, a near-tie that rounding decides the other way is no mistake."""
        excused = all(self.is_rounding(each) for each in self.divergences)
        return not self.faults and not self.collapsed and excused

    def is_rounding(self, divergence: Divergence) -> bool:
        return not self.exact and divergence.shift <= min(ROUNDING * self.rounding, NO_ROUNDING)

    @property
    def tokens_per_second(self) -> dict[int, float]:
        """Expected of one row by k: tokens a round as measured here, over the time that such a round takes."""
        plain = self.costs[0].seconds  # times of ratios that were taken within a repeat, as a machine's moods are
        seconds = {cost.k: plain * cost.ratio for cost in self.costs}
        return {run.k: run.tokens_per_round / seconds[run.k] for run in self.runs if run.k != "auto"}

    @property
    def best_k(self) -> int:
        rates = self.tokens_per_second
        return max(rates, key=rates.__getitem__)

    @property
    def deepest(self) -> Run:
        """The run that says most about acceptance: the largest fixed k."""
        return self.runs[-2]

    def as_dict(self, tokenizer: TokenizerWrapper) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "identical": self.identical,
            "first_divergence": self.told(self.divergences[0], tokenizer) if self.divergences else None,
            "acceptance_by_position": self.deepest.acceptance_by_position,
            "tokens_per_round": {str(run.k): run.tokens_per_round for run in self.runs},
            "cost_by_k": {str(cost.k): cost.as_dict() for cost in self.costs},
            "best_k": self.best_k,
            "faults": [{**asdict(fault), "what": fault.what} for fault in self.faults],
            "tokens_per_second": {str(k): rate for k, rate in self.tokens_per_second.items()},
            "collapsed": self.collapsed,
            "first_drafts": self.first_drafts.share,
            "first_drafts_tried": self.first_drafts.tried,
            "exact": self.exact,
            "kernels": self.kernels,
            "rounding": self.rounding,
            "divergences": len(self.divergences),
            "prompts": len(self.prompts),
            "tokens": self.tokens,
        }

    def told(self, divergence: Divergence, tokenizer: TokenizerWrapper) -> dict[str, Any]:
        """A divergence, with its prompt and its tokens as text."""

        def token(id: int | None) -> dict[str, Any] | None:
            return None if id is None else {"id": id, "text": tokenizer.decode([id])}

        return {
            **asdict(divergence),
            "prompt": self.prompts[divergence.prompt],
            "plain": token(divergence.plain),
            "drafted": token(divergence.drafted),
            "rounding": self.is_rounding(divergence),
        }


def probe(
    model: Model,
    tokenizer: TokenizerWrapper,
    *,
    k: int | None = None,
    tokens: int = TOKENS,
    progress: Progress = lambda doing: None,
) -> Probe:
    """Decode the built-in prompts at every depth up to k, look for faults in the head, and time the depths.
    `progress` is told what is about to be done."""
    check_asked(k, tokens, model.max_k)
    if k is None:
        k = model.max_k
    texts = short_prompts(tokenizer)
    prompts = list(texts.values())
    progress("are rows independent?")
    exact = rows_are_independent(model)
    depths: list[int | Literal["auto"]] = [*range(k + 1), "auto"]
    runs = []
    for depth in depths:
        progress(f"decoding, k = {depth}")
        runs.append(decode(model, tokenizer, prompts, depth, tokens))
    progress("reading the answers again")
    pairs = list(zip(prompts, runs[0].answers, strict=True))
    readings = [read(model, prompt, answer.tokens) for prompt, answer in pairs]
    rounding = max(largest_shift(model, *pair) for pair in zip(readings, runs[0].answers, strict=True))
    progress("looking for faults in the head")
    first_drafts, faults = find_faults(model, readings)
    progress("timing every depth")
    costs = measure_costs(model, [prompts[0][:SHORT]], ks=range(k + 1), repeats=REPEATS)
    return Probe(list(texts), tokens, exact, runs, rounding, first_drafts, faults, costs, kernels_in_use(model))


def check_asked(k: int | None, tokens: int, max_k: int) -> None:
    """Refuse what cannot be done before anything is. `max_k`: most drafts a round, of the model or of any."""
    if k is not None and not 1 <= k <= max_k:
        raise RequestError(f"k is {k}; a probe drafts from 1 to {max_k} tokens a round here")
    if tokens < FEWEST:
        raise RequestError(f"tokens is {tokens}; a probe needs at least {FEWEST} for each prompt")


def short_prompts(tokenizer: TokenizerWrapper) -> dict[str, list[int]]:
    """Of every kind the shortest, by its text: a probe is about what comes after it."""
    shortest = {}
    for kind in KINDS:
        prompt = min(builtin_prompts([kind]), key=lambda prompt: len(prompt.tokens(tokenizer)))
        said = prompt.text or prompt.messages[-1]["content"]
        shortest[said] = prompt.tokens(tokenizer)
    return shortest
