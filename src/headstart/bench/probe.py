"""Is a model's head sound, and does drafting pay on this machine? What `headstart probe` measures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from math import inf
from statistics import fmean, median
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..engine import DepthController, Engine, Request, Stats
from ..engine.invariance import is_batch_invariant
from ..errors import RequestError
from ..models import Model
from ..sampling import SamplingParams
from .head_faults import Fault, TextPass, collapsed, find_faults, rewire, run_trunk
from .local import K, decode_batch
from .prompts import KINDS, BenchPrompt, builtin_prompts

DEFAULT_K = 3  # largest k that is tried, unless the user gives one
FEWEST_TOKENS = 16  # fewer say nothing about a head
NEAR_TIE = 2.0  # rounding may decide between logits that are this many times as close as the largest measured shift
LARGEST_NEAR_TIE = 1.0  # and at most this close: a factor of e in probability is a mistake
TIMED_TOKENS = 24  # per depth and repeat
REPEATS = 2  # of the timing, after one that warms up


@dataclass(frozen=True)
class DepthRun:
    """All prompts decoded together at one depth, greedily."""

    k: K
    answers: list[list[int]]
    stats: Stats
    likeliest: list[list[list[tuple[int, float]]]]  # for each token of an answer the two likeliest, with logprobs


@dataclass(frozen=True)
class Divergence:
    """The first position at which an answer is not that of plain decoding."""

    k: K
    prompt: int  # its number
    position: int  # in the answer
    plain: int | None  # token ids; None where one answer had ended
    drafted: int | None
    margin: float  # by how many logits the model prefers the plain token; infinite where one answer had ended


@dataclass(frozen=True)
class ProbeResult:
    prompts: list[str]
    exact: bool  # kernels compute a row whatever stands beside it, so the same tokens are promised
    runs: list[DepthRun]  # k = 0, 1, 2, …, auto
    divergences: list[Divergence]
    rounding: float  # the largest shift between two logits that rounding made on these texts
    first_drafts: list[bool]  # whether each was accepted
    faults: list[Fault]
    step_seconds: list[float]  # of one sequence, at k = 0, 1, …

    @property
    def passed(self) -> bool:
        """Return whether the head is sound and the output is the model's own."""
        return not self.faults and not collapsed(self.first_drafts) and all(map(self.is_rounding, self.divergences))

    def is_rounding(self, divergence: Divergence) -> bool:
        """Return whether rounding explains a divergence. Where the same tokens are promised nothing excuses one."""
        return not self.exact and abs(divergence.margin) <= self.near_tie

    @property
    def near_tie(self) -> float:
        """Return how far apart logits may be that rounding decides, where the same tokens are not promised."""
        return min(NEAR_TIE * self.rounding, LARGEST_NEAR_TIE)

    @property
    def first_draft_acceptance(self) -> float:
        return fmean(self.first_drafts)

    @property
    def tokens_per_second(self) -> list[float]:
        """Return the expected speed of one sequence by k: tokens per round on all prompts over the time of a step."""
        fixed = zip(self.runs, self.step_seconds, strict=False)  # "auto" is last and not timed
        return [run.stats.tokens_per_round / seconds for run, seconds in fixed]

    @property
    def best_k(self) -> int:
        return self.tokens_per_second.index(max(self.tokens_per_second))

    @property
    def deepest(self) -> DepthRun:
        """Return the run at the largest fixed depth, which says most about acceptance."""
        return self.runs[-2]


def probe_steps(k: int) -> int:
    """Return how often `probe_model` reports progress."""
    return k + 5


def probe_model(
    model: Model,
    tokenizer: TokenizerWrapper,
    *,
    k: int = DEFAULT_K,
    tokens: int = 40,
    progress: Callable[[str], None] = lambda doing: None,
) -> ProbeResult:
    """Decode the built-in prompts at every depth up to k, look for faults in the head, and time the depths.

    `progress` is called with what comes next before each step.
    """
    check_probe(k, tokens, model.max_k)
    chosen = shortest_prompts(tokenizer)
    prompts = [prompt.tokens(tokenizer) for prompt in chosen]
    progress("comparing kernels on single tokens and windows")
    exact = is_batch_invariant(model)
    depths: list[K] = [*range(k + 1), "auto"]
    runs = []
    for depth in depths:
        progress(f"decoding, k={depth}")
        runs.append(decode_prompts(model, tokenizer, prompts, depth, tokens))
    progress("looking for faults in the head")
    texts = [run_trunk(model, prompt, answer) for prompt, answer in zip(prompts, runs[0].answers, strict=True)]
    first_drafts, faults = find_faults(model, texts)
    progress("timing steps at each depth")
    return ProbeResult(
        prompts=[prompt.text or prompt.messages[-1]["content"] for prompt in chosen],
        exact=exact,
        runs=runs,
        divergences=find_divergences(model, texts, runs),
        rounding=max(map(partial(largest_shift, model), texts, runs[0].likeliest)),
        first_drafts=first_drafts,
        faults=faults,
        step_seconds=time_depths(model, prompts[0], k),
    )


def check_probe(k: int, tokens: int, max_k: int) -> None:
    """Refuse what cannot be probed. `max_k`: of the model, or of any model."""
    if not 1 <= k <= max_k:
        raise RequestError(f"--k is {k}; this probe can draft 1 to {max_k} tokens per step")
    if tokens < FEWEST_TOKENS:
        raise RequestError(f"--tokens is {tokens}; a probe needs at least {FEWEST_TOKENS} per prompt")


def shortest_prompts(tokenizer: TokenizerWrapper) -> list[BenchPrompt]:
    """Return the shortest built-in prompt of each kind: a probe is about what comes after it."""
    return [min(builtin_prompts([kind]), key=lambda prompt: len(prompt.tokens(tokenizer))) for kind in KINDS]


def decode_prompts(
    model: Model, tokenizer: TokenizerWrapper | None, prompts: Sequence[Sequence[int]], k: K, tokens: int
) -> DepthRun:
    """Decode up to `tokens` tokens per prompt. "auto" starts without any knowledge, and so tries several depths."""
    engine = Engine(model, tokenizer, max_sequences=len(prompts), depth=DepthController())
    params = SamplingParams(k=k, max_tokens=tokens, logprobs=True, top_logprobs=2)
    answers, stats, likeliest = [], [], []
    for handle in [engine.submit(Request(prompt, params)) for prompt in prompts]:
        events = list(handle)
        if (error := events[-1].error) is not None:
            raise error
        answers.append([token for event in events for token in event.tokens])
        likeliest.append([each.top[:2] for event in events for each in event.logprobs or ()])
        stats += [event.stats for event in events if event.stats is not None]
    return DepthRun(k, answers, Stats.of(stats), likeliest)


def find_divergences(model: Model, texts: Sequence[TextPass], runs: Sequence[DepthRun]) -> list[Divergence]:
    """Return where answers first differ from plain decoding, which is the first run. `texts` are its answers."""
    found = []
    for run in runs[1:]:
        for number, answers in enumerate(zip(runs[0].answers, run.answers, strict=True)):
            pairs = enumerate(zip_longest(*answers))
            different = next(((position, a, b) for position, (a, b) in pairs if a != b), None)
            if different is not None:
                position, plain, drafted = different
                margin = inf
                if plain is not None and drafted is not None:
                    text = texts[number]
                    hidden = text.hidden[0, text.start + position - 1]  # [H], after which the token was chosen
                    logits: Any = rewire(model, fed_after_norm=False).logits(hidden)
                    margin = (logits[plain] - logits[drafted]).item()
                found.append(Divergence(run.k, number, position, plain, drafted, margin))
    return found


def largest_shift(model: Model, text: TextPass, likeliest: list[list[tuple[int, float]]]) -> float:
    """Return how far the logits of the two likeliest tokens move against each other between one pass over a text and
    decoding it token by token: what rounding on this device does. Next to 0 where rows are independent."""
    tokens = mx.array([[token for token, _ in each] for each in likeliest])  # [N, 2]
    decoded = mx.array([[logprob for _, logprob in each] for each in likeliest])
    logits = rewire(model, fed_after_norm=False).logits(text.hidden[0, text.start - 1 : -1])  # [N, V]
    in_one_pass = mx.take_along_axis(logits.astype(mx.float32), tokens, axis=-1)
    moved: Any = mx.abs(mx.diff(in_one_pass) - mx.diff(decoded)).max()
    return float(moved)


def time_depths(model: Model, prompt: Sequence[int], deepest: int) -> list[float]:
    """Return the seconds of a step of one sequence at k = 0 to `deepest`. Every repeat times all depths, so that a
    machine that slows down for a while slows all of them down."""
    repeats = []
    for _ in range(REPEATS + 1):
        trials = [decode_batch(model, [prompt], k, TIMED_TOKENS) for k in range(deepest + 1)]
        repeats.append([(trial.tokens_per_round or 1.0) / trial.rate for trial in trials])
    return [median(seconds) for seconds in zip(*repeats[1:], strict=True)]
