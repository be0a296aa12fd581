"""The CUDA kernels of sampling, run on the CPU: what the stock operations draw, from the same tokens."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import cuda_on_cpu
import mlx.core as mx
import numpy as np
import pytest
from sampled import steps_of

from fixtures import builtin_model, random_model
from headstart.engine.invariance import is_batch_invariant
from headstart.kernels import Backend, graph
from headstart.kernels.cuda import greedy
from headstart.kernels.cuda import sampling as kernels
from headstart.kernels.cuda import steps as cuda_steps
from headstart.sampling import (
    BatchContext,
    Controls,
    Proposal,
    Sampler,
    SamplingParams,
    SequenceParams,
    controls,
)
from headstart.sampling.distribution import sampling_distribution
from headstart.sampling.noise import Purpose, uniform

NAN, INF = float("nan"), float("inf")
V = 8 * 150
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.99},
    {},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 2.0, "min_p": 0.9, "min_tokens_to_keep": 7},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_p": 1e-6, "top_k": 5},
    {"temperature": 0.9, "top_k": V - 1, "min_p": 1e-3, "top_p": 0.97},
    {"temperature": 0.9, "top_k": 3, "accept": "ratio"},
]
EXCLUDES: dict[str, Any] = {"temperature": 0.8, "xtc_probability": 0.9, "xtc_threshold": 0.02}
XTC: list[dict[str, Any]] = [
    EXCLUDES,
    {**EXCLUDES, "top_k": 6, "seed": 5},
    {**EXCLUDES, "top_p": 0.9, "xtc_special_tokens": tuple(range(0, V, 3))},
    {**EXCLUDES, "min_p": 0.03, "top_k": 2, "xtc_special_tokens": tuple(range(0, V, 2))},
    {**EXCLUDES, "xtc_threshold": 0.0, "top_p": 0.8},
    {**EXCLUDES, "xtc_probability": 1.0, "xtc_threshold": 0.3, "min_p": 1e-3, "min_tokens_to_keep": 3},
]


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu() -> Iterator[None]:
    with cuda_on_cpu.emulated() as patch:
        for module in (kernels, greedy):
            patch.setattr(module, "THREADS", 64)
        yield


def ruled(params: list[dict[str, Any]], vocabulary: int = V) -> Controls:
    sequences = [SequenceParams(SamplingParams(**each), 7 + n, 0, 100) for n, each in enumerate(params)]
    return controls(sequences, vocabulary)


def random_logits(shape: tuple[int, ...], seed: int, spread: float = 3.0) -> mx.array:
    return mx.array(spread * np.random.default_rng(seed).normal(size=shape), mx.float32)


def drawn_from(logits: mx.array, cuts: mx.array, rows: Controls) -> np.ndarray:
    """The probabilities [B, W, V] that `cuts` describe."""
    x, parts = np.array(logits, np.float32) + 0, np.moveaxis(np.array(cuts), -1, 0)[..., None]
    assert (parts[5] == -1).all()
    bits = x.view(np.uint32)
    key = np.where(bits >> 31, bits, ~bits & 0x7FFFFFFF).astype(np.uint64)
    code, ends = key << 32 | np.arange(x.shape[-1], dtype=np.uint64), parts[:4].view(np.uint32).astype(np.uint64)
    first, last = ends[0] << 32 | ends[1], ends[2] << 32 | ends[3]
    special = False if rows.xtc is None else (np.arange(x.shape[-1])[:, None] == np.array(rows.xtc.special)).any(-1)
    kept = (code <= last) & ((code >= first) | special)
    temperature, total = np.array(rows.temperature), parts[4].view(np.float32)
    scores = x / np.where(temperature == 0, 1, temperature)
    return np.where(kept, np.exp(scores - total), 0)


def check(logits: mx.array, rows: Controls, ahead: int | None = None) -> kernels.Draws:
    """Hold tokens and distributions against the stock operations'."""
    B, W, _ = logits.shape
    lengths, rounds = mx.arange(B) * 5, mx.arange(B) + 3
    sampler = Sampler(*rows.packed, lengths, rounds, rows.truncates, *(rows.xtc or ()))
    found = kernels.launch_draw(logits, sampler, ahead)
    keys = rows.noise_keys(rounds, lengths[:, None] + 1 + (ahead or 0) + mx.arange(W))
    expected = sampling_distribution(logits.astype(mx.float32), rows, uniform(keys[Purpose.XTC]))
    keys = keys[Purpose.NEXT if ahead is None else Purpose.DRAFT]
    made = drawn_from(logits.astype(mx.float32), found.cuts, rows)
    assert (np.array(found.finite) == 1).all()
    assert ((made > 1e-30) == np.array(expected.dense(V) > 1e-30)).all()
    assert np.abs(made - np.array(expected.dense(V))).max() < 2e-5
    assert found.tokens.tolist() == expected.sample(keys).tolist()
    return found


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, pytest.param(mx.float16, marks=pytest.mark.slow)])
def test_tokens_and_distributions_are_those_of_stock_operations(dtype: mx.Dtype) -> None:
    params = [*PARAMS, *XTC]
    logits = random_logits((len(params), 3, V), 0).astype(dtype)
    check(logits, ruled(params))
    check(logits[:, 1:2], ruled(params), ahead=4)


@pytest.mark.parametrize("spread", [0.0, 0.004, 0.3, 40.0])
def test_flat_rows_ties_and_forbidden_tokens(spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat rows have more than a block's list in one bin: cuts go on by the bits of logits, then of ids."""
    params = [
        {"temperature": 1.0, **each} for each in ({"top_k": 700}, {"top_k": 1100}, {"top_p": 0.7713}, {"top_k": 3})
    ]
    logits = mx.round(random_logits((4, 2, V), 1, spread) * 512) / 512
    logits[:, 1, 100:900] = -INF
    check(logits, ruled(params))
    check(logits.astype(mx.bfloat16), ruled(params))
    logits[:, :, ::2] = mx.where(logits[:, :, ::2] == 0, -0.0, logits[:, :, ::2])
    check(logits, ruled(params))


def test_a_row_draws_the_same_in_any_batch_type_and_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, rows = random_logits((len(PARAMS), 2, V), 3).astype(mx.bfloat16), ruled(PARAMS)
    together = check(logits, rows)
    for parts in (1, 7):
        monkeypatch.setattr(kernels, "PARTS", parts)
        again = check(logits.astype(mx.float32), rows)
        for one, other in zip(together[:3], again[:3], strict=True):
            assert mx.array_equal(one, other)
    for b in range(0, len(PARAMS), 3):
        at = mx.array([5 * b + 1]), mx.array([b + 3])
        sampler = Sampler(*[each[b : b + 1] for each in rows.packed], *at, True)
        alone = kernels.launch_draw(logits[b : b + 1, 1:], sampler)
        assert alone.tokens.item() == together.tokens[b, 1].item()
        assert mx.array_equal(alone.cuts[0, 0], together.cuts[b, 1])


def test_rows_that_are_not_finite_say_so() -> None:
    rows = ruled([{"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}, {"top_k": 3, "temperature": 1.0}, {}])
    logits = random_logits((4, 4, V), 4)
    logits[:, 0, 77] = NAN
    logits[:, 1] = -INF
    logits[:, 2, 9] = INF
    found = kernels.launch_draw(logits, Sampler(*rows.packed, *[mx.zeros((4,), mx.int32)] * 2, True))
    assert found.finite.tolist() == [[0, 0, 0, 1]] * 4
    assert (0 <= np.array(found.tokens)).all()
    assert (np.array(found.tokens) < V).all()


FEW = 24  # tokens, so that drafts are often accepted
RATIO = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.95},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.5, "top_p": 0.6},
]
OTHERS = [{"temperature": 1.0, "seed": 3}, {}, {"temperature": 0.8, "top_k": 4, "seed": 9}]


def verdicts(
    backend: Backend, params: list[dict[str, Any]], k: int, certain: mx.array | None, way: str
) -> tuple[list[list[int]], list[int], list[list[int]]]:
    """The drafts of a window, how many are accepted, and what is generated: the drafter knows the target roughly."""
    B, rows = len(params), ruled(params, FEW)
    target, noise = random_logits((B, k + 1, FEW), k), random_logits((B, k, FEW), 99, 0.7)
    head = (target[:, :k] + noise).astype(mx.bfloat16)
    target = target.astype(mx.bfloat16)
    if way == "part":  # of the vocabulary
        head = mx.where(mx.arange(FEW) % 3 == 0, -INF, head.astype(mx.float32))
    draw = np.random.default_rng(k)
    lengths, rounds, max_k, remaining = (
        mx.array(draw.integers(*of, B), mx.int32) for of in ((0, 99), (0, 9), (0, k + 1), (-1, 9))
    )
    context = BatchContext(rows, lengths, rounds, mx.zeros((B, 0), mx.int32), remaining)
    proposal = Proposal.none(B)
    width = k if way == "block" else 1
    for j in range(0, k, width):
        given = None if certain is None else certain[:, j : j + width]
        proposal = backend.propose(head[:, j : j + width], proposal, context, given)
    if way == "copies":
        assert certain is not None
        proposal = backend.propose_given(certain, rows, FEW)
        max_k = mx.minimum(max_k, proposal.valid)
    window = mx.concatenate([mx.zeros((B, 1), mx.int32), proposal.tokens], axis=1)
    choice = backend.choose(target, window, proposal, max_k, context)
    verdict = backend.accept(choice, window, max_k, context)
    accepted, tokens = verdict.accepted, verdict.tokens
    assert mx.array_equal(verdict.last, mx.take_along_axis(tokens, accepted[:, None], axis=1)[:, 0])
    pairs = zip(tokens.tolist(), accepted.tolist(), strict=True)
    return proposal.tokens.tolist(), accepted.tolist(), [line[: n + 1] for line, n in pairs]


@pytest.mark.parametrize(
    ("k", "way"), [(1, "head"), (3, "head"), (3, "block"), (3, "part"), (3, "copies"), (9, "head")]
)
def test_drafts_are_verified_as_by_stock_operations(k: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the ratio rule, beside sequences with other rules; some drafts are certain. Drafts and tokens are the same,
    given the same noise."""
    params = [*RATIO * 4, *OTHERS]
    given = np.random.default_rng(k).integers(-9, FEW, (len(params), k)).astype(np.int32)
    certain = mx.array(np.where(given < 0, -1, given)) if way in ("copies", "part") else None
    expected = verdicts(Backend(), params, k, certain, way)
    monkeypatch.setattr(kernels, "PARTS", 1 if k == 9 else 2)
    monkeypatch.setattr(kernels, "ROWS", 999)
    assert verdicts(cuda_steps.CudaSteps(), params, k, certain, way) == expected
    assert len(set(expected[1])) > 1


COLD = {"temperature": 0.4, "top_k": 20, "top_p": 0.95}
BATCHES = {
    "ratio": [COLD, {"temperature": 0.3}],
    "coupled": [{**COLD, "seed": 1}, {"temperature": 0.3, "min_p": 0.01, "seed": 2}, {}],
    "penalties": [{**COLD, "seed": 1}, {**COLD, "presence_penalty": 0.5}],
    "sigma": [{**COLD, "seed": 1}, {"temperature": 0.8, "top_n_sigma": 1.5}, {}],
    "xtc": [{**COLD, "seed": 1}, {**COLD, "xtc_probability": 0.5}, {**COLD, "accept": "optimistic"}],
    "greedy": [{"repetition_penalty": 1.1, "logprobs": True, "top_logprobs": 3}, {}],
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_step_generates_the_same_as_with_stock_ops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ks = builtin_model(dtype=mx.bfloat16), [3, 0, 2, 3]
    expected = steps_of(model, BATCHES[name], ks)
    monkeypatch.setattr(graph, "OFTEN", 10)  # kernels run while they are described
    if name != "sigma":  # which MLX's operations apply
        monkeypatch.setattr(cuda_steps.CudaSteps, "propose", None)  # all drafts come from one graph
    monkeypatch.setattr(Backend, "choose", None)
    assert steps_of(cuda_on_cpu.steps_on_cpu(model), BATCHES[name], ks) == expected
    assert max(len(tokens) for made in expected for tokens in made) > 2  # drafts were accepted


def test_the_warm_up_has_every_kernel_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    described = []

    def described_only(name: str, **rest: Any) -> Any:
        def launch(*, output_shapes: Any, output_dtypes: Any, **rest: Any) -> list[mx.array]:
            described.append(name)
            return [mx.zeros(*each) for each in zip(output_shapes, output_dtypes, strict=True)]

        return launch

    monkeypatch.setattr(kernels, "cuda_kernel", described_only)
    for kernel in [
        name for name in vars(kernels) if name.endswith("_kernel") and name[0] == "_" and name != "_kernel"
    ]:
        monkeypatch.setattr(kernels, kernel, getattr(kernels, kernel).__wrapped__)
    model = random_model("dense")
    monkeypatch.setattr(
        type(model.backend), "compile_sampling", lambda self, logits: kernels.describe_sampling(logits)
    )
    monkeypatch.setattr(type(model.backend), "is_shown", lambda *_: False)
    is_batch_invariant(replace(model))  # not one that was measured before
    drawn = ["cut_rows", "draw_tokens", "verify_by_ratio"]
    assert described == ["survey_rows", *drawn, "change_rows", *drawn, "score_parts", "merge_scores"]
