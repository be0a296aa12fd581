"""An adapter that is damaged, of another kind or for another model is refused by name, before weights are read."""

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from adapters import write_adapter
from checkpoints import write
from headstart.checkpoint import LoadPlan, load_model
from headstart.errors import CheckpointError

CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "model", "dense")


def change_config(**fields: Any) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        config = json.loads((path / CONFIG).read_text())
        (path / CONFIG).write_text(json.dumps(config | fields))

    return change


def change_tensors(change: Callable[[dict[str, mx.array]], object]) -> Callable[[Path], object]:
    def rewrite(path: Path) -> None:
        arrays: Any = mx.load(str(path / WEIGHTS))
        mx.eval(arrays)
        change(arrays)
        mx.save_safetensors(str(path / WEIGHTS), arrays)

    return rewrite


LAYER = "language_model.model.layers.3.self_attn.q_proj"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / CONFIG).unlink(), "adapter_config.json is missing. Name a folder that `mlx_lm.lora"),
        (lambda path: (path / WEIGHTS).rename(path / "adapter_model.safetensors"), "It is PEFT's format"),
        (lambda path: (path / CONFIG).write_text("{rank: 8}"), "adapter_config.json: not JSON"),
        (lambda path: (path / CONFIG).write_text("[]"), "not a JSON object but"),
        (lambda path: (path / WEIGHTS).write_bytes(b"nothing"), "not a safetensors file, or truncated"),
        (change_config(fine_tune_type="dora"), "fine_tune_type is 'dora'; only lora"),
        (change_config(fine_tune_type="full", lora_parameters=None), "fine_tune_type is 'full'; only lora"),
        (change_config(lora_parameters=None), "lora_parameters.rank is None"),
        (change_config(lora_parameters={"rank": 4, "alpha": 8}), "lora_parameters.scale is None"),
        (change_config(lora_parameters={"rank": 4, "scale": float("inf")}), "scale is inf"),
        (change_config(lora_parameters={"rank": 8, "scale": 2}), "with rank 8 needs"),
        (change_tensors(lambda a: a.pop(f"{LAYER}.lora_b")), f"{LAYER}.lora_a is not one of a layer's"),
        (change_tensors(lambda a: a.update({f"{LAYER}.m": mx.ones(4)})), f"{LAYER}.m is not one of a layer's"),
        (change_tensors(lambda a: a.clear()), "holds no tensors"),
        (
            change_tensors(lambda a: a.update({f"{LAYER}.lora_a": mx.zeros(a[f"{LAYER}.lora_a"].shape, mx.int32)})),
            "not of floating-point numbers",
        ),
    ],
)
def test_a_damaged_adapter_is_refused(
    damage: Callable[[Path], object], message: str, folder: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "tune", folder)
    damage(adapter)
    with pytest.raises(CheckpointError) as refused:
        LoadPlan.of(folder, adapters={"tune": adapter})
    assert message in str(refused.value)
    assert str(adapter) in str(refused.value)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"hidden_size": 128}, "has shapes (128, 4)"), ({"num_hidden_layers": 8}, "is not in this")],
)
def test_an_adapter_of_another_model_is_refused(
    sizes: dict[str, int], message: str, folder: Path, tmp_path: Path
) -> None:
    other = write(tmp_path / "other", "dense", **sizes)
    with pytest.raises(CheckpointError) as refused:
        LoadPlan.of(folder, adapters={"tune": write_adapter(tmp_path / "tune", other)})
    assert message in str(refused.value)
    assert "made for another" in str(refused.value)


@pytest.mark.parametrize("key", ["language_model.lm_head", "language_model.model.embed_tokens"])
def test_embeddings_and_the_output_layer_cannot_be_adapted(key: str, folder: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "tune", folder, keys=["mlp.up_proj", key])
    with pytest.raises(CheckpointError, match=f"changes {key}. Only linear layers and experts"):
        LoadPlan.of(folder, adapters={"tune": adapter})


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a/b", "-a", "ä", "a" * 65])
def test_a_name_that_a_request_could_not_say_is_refused(name: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a name begins with"):
        LoadPlan.of(folder, adapters={name: tmp_path})


def test_the_memory_of_adapters_counts(folder: Path, tmp_path: Path) -> None:
    adapters = {
        f"r{rank}": write_adapter(tmp_path / str(rank), folder, rank=rank, keys=["mlp.up_proj"]) for rank in (2, 128)
    }
    plain, planned = LoadPlan.of(folder), LoadPlan.of(folder, adapters=adapters)
    gc.collect()  # what is left is freed now, and not while memory is measured
    before = mx.get_active_memory()
    model = load_model(folder)
    without = mx.get_active_memory() - before
    del model
    gc.collect()
    before = mx.get_active_memory()
    adapted = load_model(folder, adapters=adapters)
    taken = mx.get_active_memory() - before - without
    counted = planned.needs.weights - plain.needs.weights
    assert list(adapted.adapters) == ["r2", "r128"]
    assert 500_000 < counted <= taken <= counted + 64 * 1024
    assert planned.needs.request == plain.needs.request


def test_several_machines_do_without_adapters(folder: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "tune", folder)
    with pytest.raises(CheckpointError, match="adapters are not available on several machines"):
        load_model(folder, adapters={"tune": adapter}, split=lambda config: pytest.fail("it is refused before"))
