"""Models in float16, as M1 and M2 compute: the text of bfloat16 but for near-ties, and float32 where it is needed."""

from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from checkpoints import write
from fixtures import generate
from headstart.bench.prompts import builtin_prompts
from headstart.checkpoint import load_model, load_tokenizer, resolve
from headstart.engine.sequence import not_finite
from headstart.kernels import choose_backend
from headstart.models import Model
from headstart.state import KV, Recurrent
from vision_models import write_with_tower

NEAR_TIE = 0.1  # logits; the largest gap that float16 closed or opened was 0.03


@pytest.fixture(scope="module")
def half() -> Model:
    return load_model("tiny-qwen3.5", dtype=mx.float16)


@pytest.mark.parametrize("kind", ["code", pytest.param("prose", marks=pytest.mark.slow)])
def test_float16_continues_a_text_as_bfloat16_does(half: Model, kind: str) -> None:
    tokenizer = load_tokenizer(resolve("tiny-qwen3.5"))
    prompt = builtin_prompts([kind])[0].tokens(tokenizer)
    whole = load_model("tiny-qwen3.5", dtype=mx.bfloat16)
    text = mx.array([[*prompt, *generate(whole, prompt, max_tokens=24).tokens]])
    state = half.make_state(1)
    hidden = half.trunk(text[:, :-1], state, certain=text.shape[1] - 1)
    logits = half.logits(hidden)[0, len(prompt) - 1 :].astype(mx.float32)  # [24, V]
    chosen = mx.take_along_axis(logits, text[0, len(prompt) :, None], axis=-1)[:, 0]
    assert hidden.dtype == mx.float16
    assert float(mx.max(mx.max(logits, axis=-1) - chosen)) < NEAR_TIE
    recurrent = [layer for layer in state.layers if isinstance(layer, Recurrent)]
    assert {layer.state.dtype for layer in recurrent} == {mx.float32}
    assert {layer.keys.dtype for layer in state.layers if isinstance(layer, KV)} == {mx.float16}


def test_float16_is_the_same_at_every_depth_and_reported(tmp_path: Path) -> None:
    half = load_model(write(tmp_path, "dense"), dtype=mx.float16)
    plain, drafted = (generate(half, [5, 17, 130, 9], max_tokens=24, k=k) for k in (0, 2))
    assert drafted.tokens == plain.tokens
    assert plain.stats.as_dict()["dtype"] == "float16"


def test_norms_of_large_activations_do_not_overflow() -> None:
    """Squares of these have no place in float16, whose largest number is 65504."""
    backend = choose_backend()
    x, weight = mx.full((1, 64), 3e4, mx.float16), mx.ones((64,))
    assert mx.allclose(backend.rms_norm(x, weight, 1e-6), mx.ones((1, 64)), rtol=1e-3)
    total, normed = backend.add_and_norm(x, x, weight, 1e-6)
    assert float(total[0, 0]) == pytest.approx(6e4, rel=1e-3)
    assert mx.allclose(normed, mx.ones((1, 64)), rtol=1e-3)


M1 = {"memory_size": 8 * 10**9, "max_recommended_working_set_size": 5 * 10**9, "architecture": "applegpu_g13g"}


def enlarge(folder: Path, name: str, factor: float) -> None:
    """Multiply a weight of a checkpoint."""
    for path in folder.glob("*.safetensors"):
        arrays = mx.load(str(path))
        if found := [key for key in arrays if key.endswith(name)]:
            arrays |= {key: arrays[key] * factor for key in found}
            mx.eval(arrays)
            mx.save_safetensors(str(path), arrays)


@pytest.mark.parametrize("large", [False, True])
def test_a_model_that_overflows_is_found_when_it_is_loaded(
    large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mx, "device_info", lambda *device: M1)
    write(tmp_path, "dense")
    if large:
        enlarge(tmp_path, "layers.0.mlp.down_proj.weight", 1e7)
    model = load_model(tmp_path)
    assert model.dtype == (mx.bfloat16 if large else mx.float16)
    assert ("overflows in float16" in caplog.text) == large
    assert len(generate(model, [5, 17, 130, 9], max_tokens=4).tokens) == 4
    if large:
        monkeypatch.setenv("HEADSTART_DTYPE", "float16")  # is what the user wants
        assert load_model(tmp_path).dtype == mx.float16


def test_a_tower_that_was_stored_in_bfloat16_never_computes_in_float16(tmp_path: Path) -> None:
    folder = write_with_tower(tmp_path)
    tower = load_model(folder, vision=True, dtype=mx.float16).tower
    assert tower is not None
    assert {array.dtype for _, array in tree_flatten(tower.parameters())} == {mx.bfloat16}


def test_an_overflow_names_the_way_out(half: Model) -> None:
    assert str(not_finite(half)).endswith("set HEADSTART_DTYPE=bfloat16")
    assert str(not_finite(load_model("tiny-qwen3.5"))).endswith("cannot go on")
