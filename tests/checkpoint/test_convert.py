"""A conversion holds the same model, keeps its head, loads in mlx-lm, and is there whole or not at all."""

import errno
import json
import multiprocessing
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import convert as mlx_lm_convert
from mlx_lm.utils import load_model as load_in_mlx_lm
from test_load import arrays_of, assert_same

from checkpoints import make_config, save, write, write_empty
from disks import read_only_folder
from headstart.checkpoint import load_model, read_layout, resolve, safetensors
from headstart.checkpoint.atomic import staging_folder
from headstart.checkpoint.convert import SIDECAR, Conversion, convert, plan_conversion
from headstart.checkpoint.layout import INDEX, NORMS
from headstart.checkpoint.quantize import Recipe
from headstart.errors import CheckpointError, HeadError

FAMILIES = ("dense", "moe", "next")


def plan(source: Path, destination: Path, dtype: mx.Dtype = mx.bfloat16, **how: Any) -> Conversion:
    return plan_conversion(read_layout(source), destination, Recipe(dtype, **how))


def converted(source: Path, destination: Path, dtype: mx.Dtype = mx.bfloat16, **how: Any) -> Path:
    convert(plan(source, destination, dtype, **how))
    return destination


def tensors(folder: Path, pattern: str = "model*.safetensors") -> dict[str, mx.array]:
    files: Any = [mx.load(str(path)) for path in sorted(folder.glob(pattern))]
    return {name: array for file in files for name, array in file.items()}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def assert_equal(found: dict[str, mx.array], expected: dict[str, mx.array]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert mx.array_equal(found[name], array), name


def every_way(ways: list[Any]) -> list[Any]:
    """Each with every family: with one of them in ordinary tests, in turn, and with the others in slow ones."""
    return [
        pytest.param(way, family, marks=[] if n % len(FAMILIES) == m else pytest.mark.slow)
        for n, way in enumerate(ways)
        for m, family in enumerate(FAMILIES)
    ]


# -- the same model


@pytest.mark.parametrize(
    ("family", "layout", "options"),
    [
        *((family, "raw", {}) for family in FAMILIES),
        ("moe", "raw-fused", {"shards": 5}),
        ("moe", "raw-per-expert", {"num_experts": 12}),
        ("dense", "raw", {"tie": True}),
    ],
)
def test_a_conversion_loads_as_the_original_does(
    tmp_path: Path, family: str, layout: str, options: dict[str, Any]
) -> None:
    raw = write(tmp_path / "raw", family, layout, **options)
    before = contents(raw)
    out = converted(raw, tmp_path / "out")
    assert_same(load_model(raw), load_model(out))
    assert read_layout(out).mtp.location == SIDECAR
    assert contents(raw) == before


def test_norms_that_half_precision_cannot_hold_are_kept_exactly(tmp_path: Path) -> None:
    """The norms of a trained model, unlike those of the tiny random ones, lose bits as 1 + w in bfloat16."""
    out = converted(resolve(), tmp_path / "out")
    assert_same(load_model(), load_model(out))
    shutil.rmtree(out / "norms")
    rounded = load_model(out).weights.layers[0].input_layernorm.weight
    assert not mx.array_equal(rounded, load_model().weights.layers[0].input_layernorm.weight)


def test_float8_is_rounded_to_the_chosen_type(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", "moe", "fp8", moe_intermediate_size=160, hidden_size=192)
    out = converted(raw, tmp_path / "out")
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    expected = arrays_of(load_model(raw, dtype=mx.bfloat16))
    for name, array in arrays_of(load_model(out, dtype=mx.bfloat16)).items():
        assert mx.array_equal(array, expected[name]), name


def test_vision_tensors_are_carried_along_as_mlx_vlm_has_them(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", "dense")
    patch = mx.random.normal((6, 3, 2, 4, 4)).astype(mx.bfloat16)
    bias = mx.arange(6).astype(mx.bfloat16)
    vision = {"model.visual.patch_embed.proj.weight": patch, "model.visual.patch_embed.proj.bias": bias}
    save(raw / "model-vision.safetensors", vision, {"format": "pt"})
    index = json.loads((raw / INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(vision, "model-vision.safetensors")
    (raw / INDEX).write_text(json.dumps(index))
    out = converted(raw, tmp_path / "out", bits=4)
    found = tensors(out)
    assert mx.array_equal(found["vision_tower.patch_embed.proj.weight"], patch.transpose(0, 2, 3, 4, 1))
    assert mx.array_equal(found["vision_tower.patch_embed.proj.bias"], bias)
    load_in_mlx_lm(out)
    assert load_model(out).has_head

    (raw / "model-vision.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-vision.safetensors: the file is missing"):
        plan(raw, tmp_path / "other")


def test_a_model_without_a_head_is_converted_without_one(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", "next", head=False, num_nextn_predict_layers=0)
    out = converted(raw, tmp_path / "out", bits=4)
    assert not (out / "mtp").exists()
    assert not load_model(out).has_head
    load_in_mlx_lm(out)


# -- mlx-lm


@pytest.mark.parametrize(
    ("how", "family"),
    every_way([{}, {"bits": 4}, {"bits": 8, "group_size": 32}, {"bits": 3, "mix": 6}, {"mode": "nvfp4"}]),
)
def test_the_shards_are_those_that_mlx_lm_writes(tmp_path: Path, family: str, how: dict[str, Any]) -> None:
    raw = write(tmp_path / "raw", family, num_hidden_layers=8)
    out = converted(raw, tmp_path / "out", **how)
    quantize = {
        "quantize": bool(how),
        "q_bits": None if "mix" in how else how.get("bits"),
        "q_group_size": how.get("group_size", None if "mode" in how else 64),
        "q_mode": how.get("mode", "affine"),
        "quant_predicate": "mixed_3_6" if "mix" in how else None,
    }
    mlx_lm_convert(str(raw), str(tmp_path / "theirs"), dtype="bfloat16", **quantize)
    theirs = tensors(tmp_path / "theirs")
    found = tensors(out)
    if "mix" in how:  # which would have the routers in 3 bits
        ours_alone = {name for name in found if ".mlp.gate." in name or "shared_expert_gate" in name}
        theirs = {name: array for name, array in theirs.items() if name not in ours_alone}
        found = {name: array for name, array in found.items() if name not in ours_alone}
    assert_equal(found, {n: a.astype(found[n].dtype) if n.endswith("A_log") else a for n, a in theirs.items()})

    if "mix" not in how:
        ours, theirs_ = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "theirs"))
        assert ours.get("quantization") == theirs_.get("quantization")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bits", [None, 4])
def test_mlx_lm_runs_a_conversion_in_the_type_of_its_files(tmp_path: Path, family: str, bits: int | None) -> None:
    out = converted(write(tmp_path / "raw", family), tmp_path / "out", bits=bits)
    model, _ = load_in_mlx_lm(out)
    flat = dict(arrays_of_mlx_lm(model))
    assert {str(array.dtype) for name, array in flat.items() if "norm" in name} == {"mlx.core.bfloat16"}
    assert not [name for name in flat if "mtp" in name]
    if family == "dense" or bits:  # unquantised experts in bfloat16 do not run on CPU
        assert model(mx.array([[5, 17, 130]])).dtype == mx.bfloat16


def arrays_of_mlx_lm(model: Any) -> list[tuple[str, mx.array]]:
    from mlx.utils import tree_flatten

    flat: Any = tree_flatten(model.parameters())
    return flat


# -- what is quantised


@pytest.mark.parametrize(
    ("case", "family"),
    every_way(
        [
            ({}, None, None),
            ({"bits": 4}, 4, 8),
            ({"bits": 8}, 8, 8),
            ({"bits": 4, "mtp_bits": "keep"}, 4, None),
            ({"bits": 4, "mtp_bits": 4}, 4, 4),
            ({"mtp_bits": 6}, None, 6),
        ]
    ),
)
def test_what_is_quantised(tmp_path: Path, family: str, case: tuple[dict[str, Any], int | None, int | None]) -> None:
    how, trunk, head = case
    out = converted(write(tmp_path / "raw", family), tmp_path / "out", **how)
    layout = read_layout(out)
    bits = {name: packing["bits"] for name, packing in layout.quantized.items()}
    for name in ("embed_tokens", "layers.0.linear_attn.out_proj", "layers.3.self_attn.q_proj"):
        assert bits.get(name) == trunk, name
    assert bits.get("mtp.layers.0.self_attn.q_proj") == head
    assert "mtp.fc" not in bits
    if family != "dense":
        for router in ("mlp.gate", "mlp.shared_expert_gate"):
            assert bits.get(f"layers.0.{router}") == (8 if trunk else None)
            assert bits.get(f"mtp.layers.0.{router}") == (8 if head else None)
        assert bits.get("layers.0.mlp.switch_mlp.up_proj") == trunk
        assert bits.get("mtp.layers.0.mlp.switch_mlp.down_proj") == head
    for name, part in layout.stored.items():
        if name.endswith("A_log") or ("norm" in name and not name.endswith("linear_attn.norm.weight")):
            assert part.dtype == mx.float32, name
    assert layout.stored["mtp.fc.weight"].dtype == mx.bfloat16
    assert load_model(out).has_head


def test_float16_is_written_on_request(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", "dense")
    out = converted(raw, tmp_path / "out", mx.float16, bits=4)
    assert read_layout(out).dtype == "float16"
    config = json.loads((out / "config.json").read_text())
    assert (config["dtype"], config["text_config"]["dtype"]) == ("float16", "float16")
    assert {a.dtype for a in tensors(out).values()} == {mx.float16, mx.uint32, mx.float32}  # A_log
    assert converted(raw, tmp_path / "f32", mx.float32)
    assert not (tmp_path / "f32" / NORMS).exists()


def test_values_that_float16_cannot_hold_are_named(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", "dense", shards=1)
    file = raw / "model-00001-of-00001.safetensors"
    arrays: Any = mx.load(str(file))
    arrays["lm_head.weight"] = arrays["lm_head.weight"] * 1e6
    save(file, arrays, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lm_head.weight has values that float16 cannot hold"):
        converted(raw, tmp_path / "out", mx.float16)
    assert not list(tmp_path.glob(".*"))
    assert not (tmp_path / "out").exists()


# -- refusals


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"bits": 7}, "7 bits: mlx quantises to 1, 2, 3, 4, 5, 6, 8 bits in the mode affine"),
        ({"mode": "nvfp4", "bits": 8}, "8 bits: mlx quantises to 4 bits in the mode nvfp4"),
        ({"mode": "affine"}, "mode affine: say with how many bits"),
        ({"mode": "fp4"}, "mode fp4: mlx has affine, mxfp4"),
        ({"mtp_bits": 7}, "--mtp-bits 7: say keep, or one of 1, 2, 3"),
        ({"bits": 4, "group_size": 48}, "groups of 48"),
        ({"bits": 4, "mix": "more"}, "more: say keep, a number of bits, or a mode of mxfp4"),
        ({"mix": 6}, "say with --bits or --mode what the others do"),
        ({"mix": "no/such.json"}, "no/such.json: the file is missing"),
    ],
)
def test_options_that_make_no_sense_are_named(how: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Recipe(mx.bfloat16, **how)


def test_what_cannot_be_converted_is_refused(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw")
    with pytest.raises(CheckpointError, match=r"already converted to MLX.*graft"):
        plan(write(tmp_path / "mlx", "dense", "converted"), tmp_path / "out")
    (tmp_path / "out").mkdir()
    assert plan(raw, tmp_path / "out").files
    (tmp_path / "out" / "file").touch()
    with pytest.raises(CheckpointError, match="out: exists already"):
        plan(raw, tmp_path / "out")
    half = write(tmp_path / "half", "moe", shards=1)
    file = half / "model-00001-of-00001.safetensors"
    arrays: Any = mx.load(str(file))
    save(file, {name: array for name, array in arrays.items() if name != "mtp.fc.weight"}, {"format": "pt"})
    (half / INDEX).unlink()
    with pytest.raises(HeadError, match=r"mtp.fc.weight"):
        plan(half, tmp_path / "new")


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = plan(write(tmp_path / "raw"), tmp_path / "out")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=9))
    with pytest.raises(CheckpointError, match=rf"out: {job.nbytes:,} bytes will be written.*has 9 free"):
        convert(job)
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def test_a_disk_that_fills_up_is_named_and_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = write(tmp_path / "raw")
    real, written = safetensors.append_array, 0

    def fills_up(file: Any, array: mx.array) -> None:
        nonlocal written
        written += array.nbytes
        if written > 100_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, array)

    monkeypatch.setattr(safetensors, "append_array", fills_up)
    with pytest.raises(CheckpointError, match=r"out: the disk is full\. Nothing was left behind"):
        converted(raw, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def test_a_read_only_folder_is_named(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw")
    message = r"read-only cannot be written to \(.*\)\. Choose another folder"
    with read_only_folder(tmp_path / "read-only") as folder, pytest.raises(CheckpointError, match=message):
        converted(raw, folder / "out")


# -- whole or not at all


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    job = plan(write(tmp_path / "raw"), tmp_path / "out")
    seen: list[int] = []

    def interrupt(count: int) -> None:
        seen.append(count)
        if len(seen) == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(job, interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def test_progress_adds_up_to_what_is_written(tmp_path: Path) -> None:
    for family, layout in (("moe", "raw"), ("moe", "fp8"), ("next", "raw")):
        job = plan(
            write(tmp_path / f"{family}-{layout}", family, layout), tmp_path / f"out-{family}-{layout}", bits=4
        )
        size = job.nbytes
        counts: list[int] = []
        convert(job, counts.append)
        assert sum(counts) == size
        written = sum(len(c) for n, c in contents(job.destination).items() if n.endswith(".safetensors"))
        assert 0 <= written - size < 20_000 * len(job.files)  # the headers


def test_two_processes_do_not_write_to_the_same_folder(tmp_path: Path) -> None:
    with staging_folder(tmp_path / "out") as folder:
        (folder / "file").touch()
        with (
            pytest.raises(CheckpointError, match="out: another process is writing to it"),
            staging_folder(tmp_path / "out"),
        ):
            pass
        assert (folder / "file").exists()
    assert not list(tmp_path.iterdir())
    with staging_folder(tmp_path / "out") as folder:
        assert not list(folder.iterdir())


def convert_in_a_child(source: Path, destination: Path) -> None:
    convert(plan(source, destination, bits=4))


def report_start_and_run(pipe: Any, job: Callable[..., None], arguments: tuple[Path, ...]) -> None:
    pipe.send("begun")
    job(*arguments)


def killed_at_random(job: Callable[..., None], *arguments: Path, times: int = 20) -> Iterator[bool]:
    """Run `job` in a process that is killed at a random moment; yield whether it was finished by then.

    The first is not killed, to see how long it takes.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["headstart.checkpoint.graft", "huggingface_hub.repocard", "pytest"])
    rng = random.Random(0)
    took: float | None = None
    for _ in range(times + 1):
        ours, theirs = context.Pipe()
        child = context.Process(target=report_start_and_run, args=(theirs, job, arguments))
        child.start()
        theirs.close()  # so that a child that cannot even begin is noticed
        ours.recv()
        started = time.perf_counter()
        child.join(took and rng.random() * took)
        took = took or time.perf_counter() - started
        child.kill()
        child.join()
        yield child.exitcode == 0
        child.close()


@pytest.mark.slow  # test_disk_trouble.py chooses the moment
def test_killed_at_any_moment_the_destination_is_absent_or_complete(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", "moe", num_hidden_layers=8)
    before, out = contents(raw), tmp_path / "out"
    complete: dict[str, bytes] = {}
    outcomes = []
    for finished in killed_at_random(convert_in_a_child, raw, out):
        assert finished <= out.exists()
        if out.exists():
            complete = complete or contents(out)
            assert contents(out) == complete
            shutil.rmtree(out)
        outcomes.append((finished, bool(list(tmp_path.glob(".out*")))))
    assert contents(raw) == before
    assert sum(not finished for finished, _ in outcomes) >= 5
    assert any(left for _, left in outcomes), "no kill hit the writing"
    converted(raw, out, bits=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "raw"]  # what the dead left is gone


# -- memory


@pytest.mark.slow
def test_six_gigabytes_are_converted_in_little_memory(tmp_path: Path) -> None:
    """Experts fused in tensors of 0.8 GB and embeddings of 1 GB, whose values are holes on disk. One is in memory."""
    from mlx.utils import tree_flatten

    from headstart import models

    sizes = {"vocab_size": 248_320, "hidden_size": 2048, "num_hidden_layers": 4, "num_experts": 128}
    sizes |= {"moe_intermediate_size": 768, "head_dim": 128}
    config = make_config("moe", tie=False, dtype=mx.bfloat16, **sizes)
    flat: Any = tree_flatten(models.build(json.loads(json.dumps(config))).weights.parameters())
    shapes: dict[str, list[int]] = {}
    for name, array in flat:
        raw = name if name.startswith(("mtp.", "lm_head.")) else f"model.language_model.{name}"
        block, _, projection = raw.partition(".switch_mlp.")
        shape = list(array.shape)
        if projection == "down_proj.weight":
            shapes[f"{block}.experts.down_proj"] = shape
        elif projection:
            shapes[f"{block}.experts.gate_up_proj"] = [shape[0], 2 * shape[1], shape[2]]
        else:
            shapes[raw] = [shape[0], 1, shape[1]] if raw.endswith("conv1d.weight") else shape
    write_empty(tmp_path / "raw", config, shapes)
    size = (tmp_path / "raw" / "model.safetensors").stat().st_size
    assert size > 6e9
    child = subprocess.run(
        [sys.executable, __file__, str(tmp_path / "raw"), str(tmp_path / "out")],
        check=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    peak = int(child.stdout)
    print(f"{size / 1e9:.2f} GB converted with a peak of {peak / 1e9:.2f} GB")
    largest = 2 * sizes["vocab_size"] * sizes["hidden_size"]
    assert peak < 2 * largest
    assert read_layout(tmp_path / "out").mtp.available


if __name__ == "__main__":
    converted(Path(sys.argv[1]), Path(sys.argv[2]), bits=4)
    unit = 1 if sys.platform == "darwin" else 1024
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def test_a_table_says_what_each_matrix_becomes(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    table.write_text(json.dumps({r"layers\.0\..*down_proj": "keep", "down_proj": "mxfp8", "lm_head": 8}))
    out = converted(write(tmp_path / "raw"), tmp_path / "out", bits=4, mix=table)
    found = read_layout(out).quantized
    assert "layers.0.mlp.down_proj" not in found
    assert found["layers.1.mlp.down_proj"]["mode"] == "mxfp8"
    assert (found["lm_head"]["bits"], found["layers.1.mlp.up_proj"]["bits"]) == (8, 4)
    load_in_mlx_lm(out)
    table.write_text(json.dumps({"(": 8}))
    with pytest.raises(CheckpointError, match=r"table.json: missing \)"):
        Recipe(mx.bfloat16, mix=table)
