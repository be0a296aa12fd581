"""Models of mlx-lm's that are no family of ours: the same engine, and mlx-lm's own text."""

import random
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.utils import load as mlx_lm_load

from fixtures import Answer, collect, generate, mlx_lm_greedy, submit
from headstart.checkpoint import load_model, load_tokenizer, read_layout, resolve
from headstart.engine import Engine, Request
from headstart.engine.copies import CopyIndex
from headstart.engine.depth import DepthController, Plan
from headstart.engine.draft import Source
from headstart.engine.draft_history import DraftHistory
from headstart.engine.invariance import is_batch_invariant
from headstart.errors import AdapterError, CheckpointError, DrafterError, HeadError, RequestError
from headstart.limits import MAX_K
from headstart.models import FAMILIES
from headstart.models.wrapped import WrappedModel, problem_with
from headstart.sampling_params import GrammarSpec, SamplingParams
from headstart.state import PrefixCache
from others import CONFIGS, write_other

BATCHES, BATCHES_PLAIN = "in batches, with copied drafts", "in batches, without drafts"
ALONE, ALONE_PLAIN = "one sequence at a time, with copied drafts", "one sequence at a time, without drafts"
PLANS = dict.fromkeys(CONFIGS, BATCHES)
PLANS |= dict.fromkeys(("mamba", "lfm2", "falcon_h1", "rwkv7"), BATCHES_PLAIN)
PLANS |= {"gpt_bigcode": ALONE, "llama4": ALONE_PLAIN}
FAST = ("gemma3_text", "lfm2", "gpt_bigcode", "llama4")  # one for each plan
ALL = [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in CONFIGS]
BATCHING = [
    pytest.param(name, marks=[] if name in FAST else pytest.mark.slow)
    for name, plan in PLANS.items()
    if plan in (BATCHES, BATCHES_PLAIN)
]
COUNT = 20


class Eager(DepthController):
    """Copies wherever something repeats, right or wrong."""

    def plan(
        self,
        histories: Sequence[DraftHistory],
        copies: Sequence[CopyIndex | None],
        unread: int = 0,
        most: int = MAX_K,
    ) -> Plan:
        self._round += 1
        distances = tuple(each.distance if each is not None else 0 for each in copies)
        return Plan((3, 8, 1, 0, 2)[self._round % 5], source=Source.NONE, distances=distances)


@lru_cache
def loaded(name: str) -> WrappedModel:
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(write_other(Path(folder), name), dtype=mx.float32)
    assert isinstance(model, WrappedModel)
    return model


def prompt(length: int, seed: int = 0, among: int = 8000) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(among) for _ in range(length)]


def repeated(length: int, seed: int) -> list[int]:
    tokens = prompt(length, seed)
    return [*tokens, *tokens, *tokens[: length // 2]]


def answers(engine: Engine, prompts: Sequence[list[int]], **how: object) -> list[Answer]:
    handles = [submit(engine, each, max_tokens=COUNT, **how) for each in prompts]
    found = [collect(handle) for handle in handles]
    assert [answer.error for answer in found] == [None] * len(prompts)
    return found


@pytest.mark.parametrize("name", ALL)
def test_text_is_mlx_lms_own_alone_and_in_a_batch(name: str) -> None:
    assert name not in FAMILIES
    model = loaded(name)
    assert str(model.plan) == PLANS[name], model.plan.reason
    prompts = [prompt(length, length) for length in (1, 3, 9, 40)]  # before and beyond a window of eight
    expected = [mlx_lm_greedy(model, each, COUNT) for each in prompts]
    assert len({tuple(each) for each in expected}) == len(prompts)  # random weights, but no single text
    assert [generate(model, each, max_tokens=COUNT).tokens for each in prompts] == expected
    engine = Engine(model, prefix=PrefixCache(0))
    found = answers(engine, prompts)
    assert [answer.tokens for answer in found] == expected
    assert engine.scheduler.max_sequences == (16 if model.plan.batches else 1)
    assert {answer.stats.exact for answer in found} == {is_batch_invariant(model)}


@pytest.mark.parametrize("name", ALL)
def test_text_is_the_same_with_copies_where_rejected_drafts_can_be_taken_back(name: str) -> None:
    model = loaded(name)
    prompts = [repeated(length, length) for length in (6, 11)]
    engine = Engine(model, depth=Eager(model.max_k), prefix=PrefixCache(0))
    found = answers(engine, prompts)
    assert [answer.tokens for answer in found] == [mlx_lm_greedy(model, each, COUNT) for each in prompts]
    proposed = sum(answer.stats.proposed_copies for answer in found)
    assert (proposed > 0) == model.copies == (PLANS[name] in (BATCHES, ALONE))


@pytest.mark.parametrize("name", ALL)
def test_a_recomputed_sequence_goes_on_as_it_would_have(name: str) -> None:
    model, prompts = loaded(name), [prompt(7, 1), prompt(20, 2)]
    engine = Engine(model, prefix=PrefixCache(0))
    handles = [submit(engine, each, max_tokens=COUNT, temperature=0.8, seed=5) for each in prompts]
    for _ in range(8):
        engine.run_once()
    engine.recovery.recompute_all()
    found = [collect(handle).tokens for handle in handles]
    assert found == [generate(model, each, max_tokens=COUNT, temperature=0.8, seed=5).tokens for each in prompts]


@pytest.mark.parametrize("name", BATCHING)
def test_a_prompt_resumes_from_the_prefix_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.kernels.backend.Backend.chunk", 32)
    model, shared = loaded(name), prompt(70, 3)
    engine = Engine(model, prefix=PrefixCache(10**8))
    answers(engine, [shared])
    (again,) = answers(engine, [[*shared, 5, 6]])
    assert again.stats.prefix_cache_hit == 64
    assert again.tokens == generate(model, [*shared, 5, 6], max_tokens=COUNT).tokens


def test_without_states_that_can_be_cut_nothing_is_kept_of_prompts() -> None:
    engine = Engine(loaded("gpt_bigcode"), prefix=PrefixCache(10**8))
    assert engine.prefix is None


@pytest.mark.parametrize("name", ALL)
def test_eight_bit_kv_caches_are_near_or_refused_by_name(name: str, tmp_path: Path) -> None:
    model = loaded(name)
    if not any(leaf.keeps_keys and leaf.arrays for leaf in model.plan.leaves):
        with pytest.raises(CheckpointError, match=f"{name}: 8-bit KV caches are not available"):
            load_model(write_other(tmp_path, name), kv_bits=8)
        return
    if any(shape[3] % 32 for leaf in model.plan.leaves if leaf.keeps_keys for shape, _ in leaf.arrays):
        with pytest.raises(CheckpointError, match="must be a multiple of 32"):
            model.with_kv_bits(8)
        return
    rounded, tokens = model.with_kv_bits(8), mx.array([prompt(12)])
    found, exact = (each._forward(tokens, each.make_state(1)) for each in (rounded, model))
    assert 0 < mx.linalg.norm(found - exact) < 0.05 * mx.linalg.norm(exact)
    assert generate(rounded, prompt(12), max_tokens=3).stats.exact is False


def test_a_cache_that_gives_something_else_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of the interface: what is written, where positions begin, what is seen."""
    model = loaded("gemma3_text")
    assert problem_with(model) is None
    broken = "headstart.models.mlx_lm_caches.RowCache."
    with monkeypatch.context() as patch:
        patch.setattr(broken + "make_mask", lambda self, N, **how: self.mask(None) | True)
        assert "not those with mlx-lm's own caches" in str(problem_with(model))
    with monkeypatch.context() as patch:
        patch.setattr(broken + "update_and_fetch", lambda self, keys, values: (keys, values))
        assert problem_with(model) is not None


@pytest.mark.parametrize("name", ["lfm2", "llama4"])
def test_a_grammar_is_followed(name: str) -> None:
    engine = Engine(loaded(name), load_tokenizer(resolve("tiny-qwen3.5")), prefix=PrefixCache(0))
    answer = collect(submit(engine, prompt(9), max_tokens=30, grammar=GrammarSpec("regex", "(red|blue), (one|two)")))
    assert answer.error is None
    assert engine.tokenizer.decode(answer.tokens) in {f"{a}, {b}" for a in ("red", "blue") for b in ("one", "two")}


def test_what_only_our_families_have_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_other(tmp_path / "model", "lfm2")
    for given, error in (
        ({"adapters": {"mine": folder}}, AdapterError),
        ({"drafter": "tiny-qwen3.5"}, DrafterError),
        ({"head": "tiny-qwen3.5"}, HeadError),
    ):
        with pytest.raises(error, match="lfm2 models, which mlx-lm runs: leave it out"):
            load_model(folder, **given)
    model = load_model(folder, vision=True)
    assert model.tower is None
    assert "mlx-lm's own forward runs lfm2 models" in str(model.head_unavailable)
    engine, twice = Engine(loaded("llama4")), Request(prompt(3), SamplingParams(), n=2)
    with pytest.raises(RequestError, match="at most 1 answers"):
        engine.submit(twice)


@pytest.mark.parametrize(("bits", "mode"), [(4, "affine"), (8, "mxfp8")])
def test_quantised_models_give_mlx_lms_own_text(bits: int, mode: str, tmp_path: Path) -> None:
    folder = write_other(tmp_path, "olmo2", bits=bits, mode=mode)
    layout = read_layout(folder)
    assert layout.quantization == {"bits": bits, "group_size": 32, "mode": mode}
    model = load_model(folder)
    theirs, _ = mlx_lm_load(str(folder))
    tokens = mx.array([prompt(12)])
    found, expected = model._forward(tokens, model.make_state(1)), theirs(tokens)
    assert mx.abs(found - expected).max() < 1e-4 * mx.abs(expected).max()
    count = sum(size for name, size in sizes(write_other(tmp_path / "whole", "olmo2")))
    assert layout.parameters == count


def sizes(folder: Path) -> list[tuple[str, int]]:
    arrays = mx.load(str(folder / "model.safetensors"))
    assert isinstance(arrays, dict)
    return [(name, array.size) for name, array in arrays.items()]
