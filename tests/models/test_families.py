"""Families beside Qwen3.5's: a release of each loads, and decodes like mlx-lm whatever is drafted or batched."""

import json
import tempfile
from functools import lru_cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model as mlx_lm_load

import gemma4
from families import CONFIGS, HEADS, NOT_IN_MLX_LM, REFERENCES, make_config, released_arrays, write_family
from fixtures import batch_of, collect, generate, random_prompt, submit
from headstart.checkpoint import load_model
from headstart.engine import Engine
from headstart.engine.batch import Batch
from headstart.engine.draft import Source, head_drafts
from headstart.engine.prefill import resume_prefix
from headstart.engine.step import step
from headstart.kernels import choose_backend
from headstart.kernels.attention import Attentions
from headstart.kernels.cpu.backend import CpuBackend
from headstart.models import Model
from headstart.state import GROUP, Chunks, PrefixCache
from headstart.state.snapshot import take_snapshot
from reference.numpy_models import Reference

ACCEPTED = ("accepted_draft_tokens", "proposed_draft_tokens")


@lru_cache
def loaded(family: str) -> Model:
    with tempfile.TemporaryDirectory() as folder:
        return load_model(write_family(Path(folder), family), dtype=mx.float32)


def trunk(model: Model, tokens: mx.array) -> mx.array:
    return model.trunk(tokens, model.make_state(tokens.shape[0]), certain=tokens.shape[1])


@pytest.mark.parametrize("family", [name for name in CONFIGS if name not in NOT_IN_MLX_LM])
def test_trunk_logits_are_those_of_mlx_lms_own_loader_to_rounding(family: str, tmp_path: Path) -> None:
    # mlx-lm knows the head of the released DeepSeek-V3 alone, at layer 61, as what to drop.
    folder, model = write_family(tmp_path, family), loaded(family)
    if family == "ernie4_5_moe":  # it has no bias for the choice of experts, and takes the last layer for none
        folder = write_family(tmp_path, family, moe_layer_end_index=1)
        model = load_model(folder, dtype=mx.float32)
        model.weights.layers[1].mlp.gate.e_score_correction_bias *= 0
    theirs, _ = mlx_lm_load(folder, strict=family != "deepseek_v3")
    tokens = mx.array([random_prompt(model, 40, seed) for seed in range(2)])
    ours, expected = model.logits(trunk(model, tokens)), theirs(tokens)
    assert mx.abs(ours - expected).max() < 2e-5 * mx.abs(expected).max()


# Gates before the last projection of latent attention, or an index; norms of values.
MLX_ATTENTION = ("bailing_hybrid", "deepseek_v32", "glm_moe_dsa", "glm5_next", *gemma4.CONFIGS)


@pytest.mark.skipif(not isinstance(choose_backend(), CpuBackend), reason="no CPU kernels here")
@pytest.mark.parametrize("eight_bits", [False, True])
@pytest.mark.parametrize("family", [name for name in CONFIGS if name not in MLX_ATTENTION])
def test_attention_is_one_operation_of_the_cpu_kernels(
    family: str, eight_bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("stock attention")

    for name in ("attention", "latent_attention"):
        monkeypatch.setattr(Attentions, name, refuse)
    model, tokens = loaded(family), mx.array([[1, 2, 3]])
    if eight_bits and all(size % GROUP == 0 for size in kv_sizes(model)):
        model = model.with_kv_bits(8)
    hidden = trunk(model, tokens)
    if model.has_head:
        hidden = model.head(hidden, tokens, model.make_head_state(1))
    mx.eval(hidden)


def kv_sizes(model: Model) -> set[int]:
    return {array.shape[-1] for memory in model.make_state(1).kv_layers for array in memory.arrays()}


IN_FLOAT64 = [name for name in HEADS if name not in REFERENCES or name == "step3p7"]  # others: transformers alone


@lru_cache
def reference(family: str) -> Reference:
    config = make_config(family)
    arrays = {name: np.array(a, np.float64) for name, a in released_arrays(config).items()}
    return Reference(config.get("text_config", config), arrays)


@pytest.mark.parametrize("family", IN_FLOAT64)
def test_trunk_and_head_are_the_float64_reference_to_rounding(family: str) -> None:
    model, expected = loaded(family), reference(family)
    assert model.has_head, model.head_unavailable
    prompt = random_prompt(model, 24, seed=1)
    hidden = trunk(model, mx.array([prompt[:-1]]))
    logits = expected.logits(prompt[:-1])
    assert np.abs(np.array(model.logits(hidden)[0]) - logits).max() < 2e-5 * np.abs(logits).max()
    fed, state = expected.fed(prompt[:-1]), model.make_head_state(1)
    for module in range(model.head_modules):  # all over the same pairs: their chain is in `test_drafts_…`
        made = model.head(mx.array(fed[None].astype(np.float32)), mx.array([prompt[1:]]), state, module)
        outputs, logits = expected.head(fed, prompt[1:], module)
        assert np.abs(np.array(made[0]) - outputs).max() < 2e-5 * np.abs(outputs).max()
        scores = model.draft_logits(made, module=module)
        assert np.abs(np.array(scores[0]) - logits).max() < 2e-5 * np.abs(logits).max()


@pytest.mark.parametrize("family", IN_FLOAT64)
def test_drafts_are_those_of_the_float64_reference(family: str) -> None:
    model, expected = loaded(family), reference(family)
    for length in (2, 9, 30):
        prompt = random_prompt(model, length, length)
        assert head_drafts(model, batch_of(model, prompt), 4).tokens[0].tolist() == expected.chain(prompt, 4)


REFERENCE = Path(__file__).parents[1] / "reference"
FILES = [json.loads((REFERENCE / f"{name}-heads.json").read_text()) for name in ("transformers", "mlx-vlm")]
RECORDED = {family: (file["prompt"], file[family]) for file in FILES for family in HEADS if family in file}


@pytest.mark.parametrize("family", RECORDED)
def test_trunk_and_head_are_those_of_transformers_or_mlx_vlm(family: str) -> None:
    model, (prompt, expected) = loaded(family), RECORDED[family]
    hidden = trunk(model, mx.array([prompt[:-1]]))
    made = model.head(hidden, mx.array([prompt[1:]]), model.make_head_state(1))
    for name, logits in (("logits", model.logits(hidden)), ("draft_logits", model.draft_logits(made))):
        recorded = np.array(expected[name])
        assert np.abs(np.array(logits[0, -1]) - recorded).max() < 1e-4 * np.abs(recorded).max()
    assert int(mx.argmax(model.draft_logits(made)[0, -1])) == expected["draft"]


CHUNK = 64  # of the ordinary tests; slow ones have the engine's own
PROMPTS = (5, 11, 8, 8)  # tokens; the last two are the same, of a chunk more
KINDS = ({}, {"temperature": 0.8, "seed": 3}, {}, {"temperature": 0.8, "seed": 4})
FAST = {3: HEADS, "auto": ("sliding", "qwen3_moe")}
DEPTHS = [
    *((family, k, CHUNK) for k, families in FAST.items() for family in families),
    *(
        pytest.param(family, k, 512, marks=pytest.mark.slow)
        for family in CONFIGS
        for k in ((1, 2, 3, 4) if family in HEADS else (0, "auto"))
    ),
]


@lru_cache
def plain(family: str, chunk: int) -> list[tuple[list[int], list[int]]]:
    """Prompts, and what follows each at k = 0, alone and without a prefix cache."""
    model = loaded(family)
    prompts = [random_prompt(model, length + chunk * (n > 1), length) for n, length in enumerate(PROMPTS)]
    answers = [generate(model, p, max_tokens=16, k=0, **kind) for p, kind in zip(prompts, KINDS, strict=True)]
    return [(prompt, answer.tokens) for prompt, answer in zip(prompts, answers, strict=True)]


@pytest.mark.parametrize(("family", "k", "chunk"), DEPTHS)
def test_output_is_the_same_for_every_k_batch_and_prefix(
    family: str, k: int | str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and seeded; sequences join and leave, and a prompt of two chunks is found in the prefix cache."""
    monkeypatch.setattr("headstart.kernels.backend.Backend.chunk", chunk)
    model, expected, prefix = loaded(family), plain(family, chunk), PrefixCache(10**8)
    prefix.chunk = chunk
    engine = Engine(model, max_sequences=3, prefix=prefix)
    handles = [
        submit(engine, prompt, max_tokens=16 - 3 * n, k=k, **kind)
        for n, ((prompt, _), kind) in enumerate(zip(expected, KINDS, strict=True))
    ]
    answers = [collect(handle) for handle in handles]
    for n, (answer, (_, tokens)) in enumerate(zip(answers, expected, strict=True)):
        assert answer.tokens == tokens[: 16 - 3 * n], n
        assert answer.stats.exact
    assert answers[3].stats.prefix_cache_hit == chunk
    if model.has_head:
        accepted, drafted = (sum(getattr(a.stats, name) for a in answers) for name in ACCEPTED)
        assert 0 < accepted < drafted


@pytest.mark.parametrize("family", ["step3p7", "bailing_hybrid", "deepseek_v32", "glm_moe_dsa", "glm5_next"])
def test_how_a_prompt_is_cut_changes_no_bit(family: str) -> None:
    model = loaded(family)
    tokens = mx.array([random_prompt(model, 41)])
    whole = trunk(model, tokens)
    for widths in ((1, 40), (7, 13, 21), (16, 16, 9)):
        state, begin, found = model.make_state(1), 0, []
        for width in widths:
            found.append(model.trunk(tokens[:, begin : begin + width], state, certain=width))
            state.commit(mx.array([width]), width)
            begin += width
        assert mx.array_equal(mx.concatenate(found, axis=1), whole)


@pytest.mark.parametrize("family", ["step3p7", "bailing_hybrid", "deepseek_v32", "glm_moe_dsa", "glm5_next"])
def test_eviction_changes_no_answer(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and seeded, with room for one prompt's prefixes: windows, delta states and keys of an index."""
    monkeypatch.setattr("headstart.kernels.backend.Backend.chunk", CHUNK)
    model = loaded(family)
    prompts = [random_prompt(model, CHUNK + 3, seed) for seed in range(2)]
    kinds = [{"max_tokens": 6, "k": 3, **kind} for kind in KINDS[:2]]
    expected = [generate(model, each, **kind).tokens for each, kind in zip(prompts, kinds, strict=True)]
    sizes = PrefixCache(10**8)
    sizes.chunk = CHUNK
    collect(submit(Engine(model, prefix=sizes), prompts[0], **kinds[0]))
    prefix = PrefixCache(int(1.5 * sizes.stats().bytes))
    prefix.chunk = CHUNK
    engine = Engine(model, prefix=prefix)
    for _ in range(2):
        for each, kind, tokens in zip(prompts, kinds, expected, strict=True):
            for _ in range(2):
                assert collect(submit(engine, each, **kind)).tokens == tokens
    assert prefix.stats().evictions
    assert prefix.stats().hits


def test_after_a_prefix_hit_all_modules_have_the_state_of_a_miss() -> None:
    model = loaded("mimo_v2_flash")
    assert model.head_modules == 3
    cache, prompt = PrefixCache(10**8), random_prompt(model, 513, 513)
    miss = batch_of(model, prompt)
    chunks = Chunks.of(prompt, [512])
    after = take_snapshot(miss.trunk_state, miss.unseen.hidden)
    cache.store(chunks, 1, [(miss.trunk_state, 0), (miss.head_state, 3)], after)
    hit = Batch.of_one(model, prompt, miss.params[0], max_k=4)
    assert resume_prefix(model, hit, prompt, chunks, cache) == 512
    for ours, theirs in zip(hit.unseen, miss.unseen, strict=True):
        assert mx.array_equal(ours, theirs)
    length = miss.head_state.lengths.item()
    assert hit.head_state.lengths.tolist() == [length] == [513 - 1 - 3]
    for ours, theirs in zip(hit.head_state.layers, miss.head_state.layers, strict=True):
        assert mx.array_equal(ours.keys[:, :, :length], theirs.keys[:, :, :length])
        assert mx.array_equal(ours.values[:, :, :length], theirs.values[:, :, :length])


def test_a_draft_vocabulary_limits_the_first_of_several_output_layers() -> None:
    model = loaded("step3p5").with_draft_vocabulary([3, 5, 9], "test")
    prompt = random_prompt(model, 9)
    first, *rest = head_drafts(model, batch_of(model, prompt), 3, reduced=True).tokens[0].tolist()
    assert first in (3, 5, 9)
    assert not set(rest) <= {3, 5, 9}  # their rows would be those of another module


@pytest.mark.parametrize("family", [name for name in CONFIGS if name not in HEADS])
def test_copies_from_the_context_change_no_token(family: str) -> None:
    model = loaded(family)
    prompt = 3 * random_prompt(model, 7)
    plain = generate(model, prompt, max_tokens=16, k=0).tokens
    batch, tokens, drafted = batch_of(model, prompt, k="auto"), list[int](), 0
    while len(tokens) < 16:
        made = step(model, batch, 4, source=Source.NONE, distances=[7])
        tokens += made.verdict.tokens[0, : made.verdict.accepted.item() + 1].tolist()
        drafted += made.copied.item()
    assert tokens[:16] == plain
    assert drafted > 0
