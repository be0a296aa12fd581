"""Is a model's head sound, and does drafting pay on this machine? What `headstart probe` measures."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..engine.invariance import is_batch_invariant
from ..errors import RequestError
from ..models import Model
from .faults import DraftCount, Fault, find_faults
from .identity import Divergence, GreedyRun, decode_prompts, divergences
from .kernels import kernels_in_use
from .local import K
from .prompts import KINDS, BenchPrompt, builtin_prompts
from .replay import largest_shift, replay
from .step_time import StepTime, time_depths

DEPTH = 3  # largest k that is tried, unless the user gives one
FEWEST_TOKENS = 16  # fewer say nothing about a head
ROUNDING = 2.0  # a shift is called rounding up to so many times the largest that was measured
LARGEST_ROUNDING = 1.0  # and up to so many logits: a factor of e in probability is a mistake
PROMPT_TOKENS = 8  # prefilled before steps are timed


@dataclass(frozen=True)
class ProbeResult:
    prompts: list[str]
    tokens: int
    exact: bool  # kernels compute a row whatever stands beside it, so the same tokens are promised
    runs: list[GreedyRun]  # k = 0, 1, 2, …, auto
    rounding: float  # the largest shift between two logits that rounding made on these texts
    first_drafts: DraftCount
    faults: list[Fault]
    step_times: list[StepTime]  # of one sequence, k = 0, 1, …
    kernels: dict[str, str]  # by what they compute

    @cached_property
    def divergences(self) -> list[Divergence]:
        plain, *others = self.runs
        return [each for run in others for each in divergences(plain, run)]

    @property
    def passed(self) -> bool:
        """Whether the head is sound and the output is the model's own. Where the same tokens are not promised, a
        near-tie that rounding decides the other way is no mistake."""
        excused = all(self.is_rounding(each) for each in self.divergences)
        return not self.faults and not self.first_drafts.collapsed and excused

    def is_rounding(self, divergence: Divergence) -> bool:
        return not self.exact and divergence.shift <= min(ROUNDING * self.rounding, LARGEST_ROUNDING)

    @property
    def tokens_per_second(self) -> dict[int, float]:
        """Expected of one sequence, by k: tokens per round as measured here over the time of such a step."""
        plain = self.step_times[0].seconds
        ratios = {each.k: each.ratio for each in self.step_times}
        return {run.k: run.stats.tokens_per_round / (plain * ratios[run.k]) for run in self.runs if run.k != "auto"}

    @property
    def best_k(self) -> int:
        rates = self.tokens_per_second
        return max(rates, key=rates.__getitem__)

    @property
    def deepest(self) -> GreedyRun:
        """The run at the largest fixed depth, which says most about acceptance."""
        return self.runs[-2]


def probe_model(
    model: Model,
    tokenizer: TokenizerWrapper,
    *,
    k: int | None = None,
    tokens: int = 40,
    progress: Callable[[str], None] = lambda doing: None,
) -> ProbeResult:
    """Decode the built-in prompts at every depth up to k, look for faults in the head, and time the depths.

    `progress` is called before each of `probe_steps(k)` steps.
    """
    check_probe(k, tokens, model.max_k)
    k = depth_of(k, model.max_k)
    asked = shortest_prompts(tokenizer)
    prompts = [prompt.tokens(tokenizer) for prompt in asked]
    progress("comparing kernels on single tokens and windows")
    exact = is_batch_invariant(model)
    depths: list[K] = [*range(k + 1), "auto"]
    runs = []
    for depth in depths:
        progress(f"decoding, k={depth}")
        runs.append(decode_prompts(model, tokenizer, prompts, depth, tokens))
    progress("looking for faults in the head")
    answers = runs[0].answers
    texts = [replay(model, prompt, answer.tokens) for prompt, answer in zip(prompts, answers, strict=True)]
    rounding = max(largest_shift(model, text, answer) for text, answer in zip(texts, answers, strict=True))
    first_drafts, faults = find_faults(model, texts)
    progress("timing steps at each depth")
    times = time_depths(model, prompts[0][:PROMPT_TOKENS], range(k + 1))
    names = [prompt.text or prompt.messages[-1]["content"] for prompt in asked]
    return ProbeResult(names, tokens, exact, runs, rounding, first_drafts, faults, times, kernels_in_use(model))


def depth_of(k: int | None, max_k: int) -> int:
    return min(DEPTH, max_k) if k is None else k


def probe_steps(k: int) -> int:
    return k + 5


def check_probe(k: int | None, tokens: int, max_k: int) -> None:
    """Refuse what cannot be done before anything is loaded. `max_k`: of the model, or of any model."""
    if k is not None and not 1 <= k <= max_k:
        raise RequestError(f"--k is {k}; this probe can draft 1 to {max_k} tokens per step")
    if tokens < FEWEST_TOKENS:
        raise RequestError(f"--tokens is {tokens}; a probe needs at least {FEWEST_TOKENS} per prompt")


def shortest_prompts(tokenizer: TokenizerWrapper) -> list[BenchPrompt]:
    """Return the shortest built-in prompt of each kind: a probe is about what comes after it."""
    return [min(builtin_prompts([kind]), key=lambda prompt: len(prompt.tokens(tokenizer))) for kind in KINDS]
