"""GLM-5.3-Flash: which tokens its layers attend to, what it keeps in memory and in conversions, what is refused."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from families import write_family
from fixtures import family_model, random_prompt
from headstart.checkpoint import load_model, read_layout
from headstart.checkpoint.convert import convert, plan_conversion
from headstart.checkpoint.quantize import Recipe
from headstart.errors import CheckpointError
from headstart.kernels.selection import pooled_keys
from headstart.models import Model
from headstart.state import KV

POOL, BUDGET = 4, 16
TOKENS = 46


def test_keys_of_pools_are_means_by_the_softmax_of_their_gates() -> None:
    shapes = (2, 11, 6), (2, 11, 6), (POOL, 6)
    keys, gates, bias = (mx.random.normal(shape, key=mx.random.key(n)) for n, shape in enumerate(shapes))
    found = np.array(pooled_keys(keys, gates, bias, POOL))
    assert found.shape == (2, 2, 6)  # three tokens make no pool
    for row, pool in np.ndindex(2, 2):
        at = slice(POOL * pool, POOL * (pool + 1))
        weights = np.exp(np.array(gates[row, at] + bias, np.float64))
        expected = (weights * np.array(keys[row, at])).sum(0) / weights.sum(0)
        np.testing.assert_allclose(found[row, pool], expected, rtol=1e-5)


def selections(model: Model, cuts: list[int], junk: int = 0) -> dict[int, list[list[int]]]:
    """What the rows of each layer with an index attend to, of a text cut into windows of these widths, each with so
    many drafts of `junk` behind it that are rejected."""
    found: dict[int, list[list[int]]] = {}
    kind, state, at = type(model.backend), model.make_state(1), 0
    text, layers = random_prompt(model, TOKENS), [layer.mixers[0] for layer in model.layers]
    select = kind.select_latents

    def noted(self: Any, layer: Any, *given: Any) -> mx.array:
        seen = select(self, layer, *given)
        rows = np.array(seen)[0, 0][: width if junk else None]
        found.setdefault(layers.index(layer), []).extend(np.flatnonzero(row).tolist() for row in rows)
        return seen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "select_latents", noted)
        for width in cuts:
            window = [*text[at : at + width], *[7 + at % 11] * junk]
            mx.eval(model.trunk(mx.array([window]), state, certain=width))
            state.commit(mx.array([width]), most=width)
            at += width
    return found


def test_tokens_attend_to_whole_pools_up_to_the_budget_and_to_the_rest() -> None:
    found = selections(family_model("glm5_next"), [TOKENS])
    assert [*found] == [2, 4]
    for rows in found.values():
        for at, row in enumerate(rows):
            whole, rest = divmod(at + 1, POOL)
            *_, tail = np.split(np.array(row), [len(row) - rest])
            assert tail.tolist() == list(range(whole * POOL, at + 1))
            pools = np.reshape(row[: len(row) - rest], (-1, POOL))
            assert len(pools) == min(whole, BUDGET // POOL)
            assert (pools % POOL == range(POOL)).all()
    chosen = {tuple(row) for row in found[2][-POOL:]}
    assert len(chosen) > 1  # each row chooses for itself


@pytest.mark.parametrize(("cuts", "junk"), [([7, 2, 21, *[1] * 16], 0), ([30, *[1] * 16], 3)])
def test_selections_depend_neither_on_windows_nor_on_rejected_drafts(cuts: list[int], junk: int) -> None:
    model = family_model("glm5_next")
    assert selections(model, cuts, junk) == selections(model, [TOKENS])


def test_a_token_is_kept_as_a_latent_a_key_and_its_gates() -> None:
    model = family_model("glm5_next")
    state = model.make_state(1)
    for cache in (*state.kv_layers, *model.make_head_state(1).kv_layers):
        assert isinstance(cache, KV)
        assert [array.shape[-1] for array in cache.arrays()] == [32, 0, 32, 32]
    assert len(state.recurrent_layers) == 3
    assert model.hidden_size == 64  # the head has one stream


def test_a_conversion_keeps_what_selects_and_what_mixes_streams(tmp_path: Path) -> None:
    raw = read_layout(write_family(tmp_path / "raw", "glm5_next", dtype=mx.bfloat16))
    convert(plan_conversion(raw, tmp_path / "kept", Recipe(mx.bfloat16, bits=4, group_size=32)))
    kept = read_layout(tmp_path / "kept")
    released, weights = (load_model(tmp_path / name, dtype=mx.bfloat16).weights for name in ("raw", "kept"))
    selecting = (weights.layers[2], weights.layers[4], weights.mtp.layers[0])
    held: Any = [array for layer in selecting for _, array in tree_flatten(layer.self_attn.indexer.parameters())]
    assert kept.report()["index"] == {"layers": 3, "bytes": sum(array.nbytes for array in held)}
    for layer in selecting:
        indexer = layer.self_attn.indexer
        assert indexer.weights_proj.weight.dtype == indexer.index_kpool_compress_ape.dtype == mx.float32
        assert not any("scales" in indexer[name] for name in ("wq_b", "wk", "index_kpool_compress_gate"))
        assert "scales" in layer.self_attn.o_proj
    for name in ("attn_hc", "ffn_hc"):
        ours, theirs = (each.layers[1][name] for each in (weights, released))
        assert ours.fn.weight.dtype == ours.base.dtype == ours.scale.dtype == mx.float32
        assert mx.array_equal(ours.fn.weight, theirs.fn.weight)
        assert name not in weights.mtp.layers[0]


def changed(folder: Path, **fields: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("index_kpool_always_select_tail", False),
        ("index_kpool_compress", False),
        ("qk_rope_head_dim", 16),
        ("n_group", 2),
        ("index_topk", 18),
        ("indexer_types", ["full", "full", "full", "full", "shared"]),
        ("layer_types", ["linear_attention"] * 4 + ["sliding_attention"]),
        ("mlp_layer_types", ["dense"] * 4),
        ("swiglu_limit", 0.0),
    ],
)
def test_layers_that_are_not_known_are_refused_by_name(field: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=field):
        read_layout(changed(write_family(tmp_path, "glm5_next"), **{"head_dim": 16, field: value}))


def test_a_text_model_by_itself_is_the_same(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "glm5_next")
    text, tokens = json.loads((folder / "config.json").read_text())["text_config"], mx.array([[5, 6, 7]])
    (folder / "config.json").write_text(json.dumps(text))
    model, other = load_model(folder, dtype=mx.float32), family_model("glm5_next")
    assert mx.array_equal(*(each.trunk(tokens, each.make_state(1), certain=3) for each in (model, other)))
