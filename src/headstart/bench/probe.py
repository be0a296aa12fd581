"""Is a model's head sound, and does drafting pay on this machine? What `headstart probe` measures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..engine import Engine, Request
from ..models import Model
from ..sampling import SamplingParams
from .local import K, decode_batch
from .measurement import Trial, add_up
from .prompts import KINDS, builtin_prompts

NEAR_TIE = 1.0  # rounding may decide between logits this close; a factor of e in probability is a mistake


@dataclass(frozen=True)
class Divergence:
    """The first token of an answer that is not that of plain decoding."""

    k: K
    prompt: str  # its kind
    position: int  # in the answer
    plain: str  # tokens
    drafted: str
    rounding: bool  # it is a near-tie, where the same tokens are not promised: nothing else excuses it


@dataclass(frozen=True)
class ProbeResult:
    depths: dict[K, Trial]  # all texts together, at k = 0, 1, 2, … and auto
    divergences: list[Divergence]


def probe_prompts(tokenizer: TokenizerWrapper) -> dict[str, list[int]]:
    """Return the shortest built-in prompt of each kind: a probe is about what comes after it."""
    return {kind: min((each.tokens(tokenizer) for each in builtin_prompts([kind])), key=len) for kind in KINDS}


def probe_model(
    model: Model,
    tokenizer: TokenizerWrapper,
    prompts: Mapping[str, Sequence[int]],
    k: int,
    tokens: int,
    progress: Callable[[str], None],
) -> ProbeResult:
    """Decode each prompt alone at every depth up to k and with auto, all depths by turns.

    `progress` is called before each run, (k + 2) · (1 + prompts) times, with what comes next.
    """
    depths: list[K] = [*range(k + 1), "auto"]
    trials: dict[K, list[Trial]] = {depth: [] for depth in depths}
    for depth in depths:
        progress(f"warming up, k={depth}")
        decode_batch(model, [next(iter(prompts.values()))], depth, tokens)
    for kind, prompt in prompts.items():
        for depth in depths:
            progress(f"{kind}, k={depth}")
            trials[depth].append(decode_batch(model, [prompt], depth, tokens))
    results = {depth: add_up(trials[depth]) for depth in depths}
    return ProbeResult(results, find_divergences(model, tokenizer, prompts, results))


def find_divergences(
    model: Model, tokenizer: TokenizerWrapper, prompts: Mapping[str, Sequence[int]], depths: Mapping[K, Trial]
) -> list[Divergence]:
    """Return where the answers of each depth first differ from those of k = 0."""
    found = []
    for k, trial in depths.items():
        answers = zip(prompts.items(), depths[0].sequences, trial.sequences, strict=True)
        for (kind, prompt), plain, drafted in answers:
            pairs = enumerate(zip(plain, drafted, strict=True))
            if (at := next((position for position, (a, b) in pairs if a != b), None)) is not None:
                rounding = not trial.exact and is_near_tie(model, [*prompt, *plain[:at]], plain[at], drafted[at])
                first, second = tokenizer.decode([plain[at]]), tokenizer.decode([drafted[at]])
                found.append(Divergence(k, kind, at, first, second, rounding))
    return found


def is_near_tie(model: Model, text: Sequence[int], plain: int, drafted: int) -> bool:
    """Return whether the logits of two tokens after a text are so close that rounding may decide between them."""
    params = SamplingParams(max_tokens=1, k=0, logprobs=True, top_logprobs=8)
    events = Engine(model).submit(Request(text, params))
    (token,) = [each for event in events for each in event.logprobs or ()]
    likeliest = dict(token.top)
    return {plain, drafted} <= likeliest.keys() and abs(likeliest[plain] - likeliest[drafted]) <= NEAR_TIE
