"""A graft restores exactly the head that a conversion would have kept, and reads no more than the head's files."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import convert as mlx_lm_convert
from mlx_lm.utils import load_model as load_in_mlx_lm
from test_convert import contents, converted, killed_at_random
from test_load import assert_same
from typer.testing import CliRunner

import headstart.checkpoint.graft
from checkpoints import save, write
from disks import read_only_folder, small_disk
from headstart import models
from headstart.checkpoint import load_model, read_layout
from headstart.checkpoint.convert import SIDECAR
from headstart.checkpoint.graft import graft, plan_graft
from headstart.checkpoint.layout import INDEX
from headstart.cli.main import app
from headstart.errors import CheckpointError, HeadError
from loopback_hub import Hub, running_hub

FAMILIES = ("dense", "moe", "next")
ORDINARY = ("next", "dense", "moe", "", "dense")  # by how it is quantised; the others are slow tests


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub(monkeypatch, tmp_path / "cache") as hub:
        yield hub


def grafted(model: Path, source: Path, **how: Any) -> Path:
    graft(plan_graft(read_layout(model), source, **how))
    return model


def stripped(source: Path, destination: Path, **how: Any) -> Path:
    """What mlx-lm makes of it."""
    quantize = {"quantize": "bits" in how, "q_bits": how.get("bits"), "q_group_size": how.get("group_size")}
    mlx_lm_convert(str(source), str(destination), dtype="bfloat16", **quantize)
    assert not read_layout(destination).mtp.available
    return destination


@pytest.mark.parametrize(
    ("family", "how", "mtp_bits"),
    [
        pytest.param(family, how, mtp_bits, marks=[] if family == ORDINARY[number] else pytest.mark.slow)
        for family in FAMILIES
        for number, (how, mtp_bits) in enumerate(
            [
                ({"bits": 4}, None),
                ({"bits": 4}, "keep"),
                ({"bits": 8, "group_size": 32}, 4),
                ({}, None),
                ({"group_size": 32}, 6),
            ]
        )
    ],
)
def test_a_graft_is_the_head_that_a_conversion_keeps(
    tmp_path: Path, family: str, how: dict[str, Any], mtp_bits: Any
) -> None:
    raw = write(tmp_path / "raw", family, shards=5)
    kept = converted(raw, tmp_path / "kept", **how, mtp_bits=mtp_bits)
    for lost in (
        stripped(raw, tmp_path / "lost", **how),
        Path(shutil.copytree(kept, tmp_path / "cut", ignore=shutil.ignore_patterns("mtp"))),
    ):
        before = contents(lost)
        # Of the groups of a trunk that is not quantised nothing is written down.
        grafted(lost, raw, mtp_bits=mtp_bits, group_size=None if "bits" in how else how.get("group_size"))
        assert (lost / SIDECAR).read_bytes() == (kept / SIDECAR).read_bytes()
        after = contents(lost)
        assert after.keys() - before.keys() == {SIDECAR}
        assert {name for name in before if after[name] != before[name]} <= {"config.json"}
        load_in_mlx_lm(lost)
    assert_same(load_model(kept), load_model(lost))


@pytest.mark.parametrize(
    ("layout", "options"), [("converted", {}), ("sidecar", {}), ("raw-sidecar", {}), ("fp8", {})]
)
def test_a_head_can_come_from_a_checkpoint_of_any_layout(
    tmp_path: Path, layout: str, options: dict[str, Any]
) -> None:
    source = write(tmp_path / "source", "moe", layout, **options)
    lost = write(tmp_path / "lost", "moe", "stripped", bits=4)
    assert load_model(grafted(lost, source)).has_head


def test_a_head_that_is_quantised_already_stays_as_it_is(tmp_path: Path) -> None:
    source = write(tmp_path / "source", "moe", "converted", bits=4, head_bits=4)
    lost = write(tmp_path / "lost", "moe", "stripped", bits=4)
    with pytest.raises(HeadError, match=r"quantised already. Leave --mtp-bits and --group-size out"):
        plan_graft(read_layout(lost), source, mtp_bits=8)
    with pytest.raises(HeadError, match="quantised already"):
        plan_graft(read_layout(lost), source, group_size=32)
    assert_same(load_model(source), load_model(grafted(lost, source)))


@pytest.mark.parametrize("family", ["dense", pytest.param("moe", marks=pytest.mark.slow), "next"])
def test_config_learns_of_a_head_that_it_did_not_promise(tmp_path: Path, family: str) -> None:
    raw = write(tmp_path / "raw", family)
    lost = stripped(raw, tmp_path / "lost", bits=4)
    config = json.loads((lost / "config.json").read_text())
    models.text_config(config).pop("num_nextn_predict_layers" if family == "next" else "mtp_num_hidden_layers")
    (lost / "config.json").write_text(json.dumps(config))
    grafted(lost, raw)
    config = json.loads((lost / "config.json").read_text())
    assert models.head_modules(config) == 1
    assert config["mlx_lm_extra_tensors"] == {"mtp_file": SIDECAR}


@pytest.mark.parametrize("place", ["mtp.safetensors", "mtp/weights.safetensors"])
def test_a_head_that_cannot_be_used_is_passed_over(tmp_path: Path, place: str) -> None:
    raw = write(tmp_path / "raw", "dense")
    broken = write(tmp_path / "broken", "dense", "sidecar", sidecar=place)
    arrays: Any = mx.load(str(broken / place))
    save(broken / place, arrays, None)  # nothing says what its norms are
    assert not read_layout(broken).mtp.available
    assert_same(load_model(raw), load_model(grafted(broken, raw)))


# -- what is read


def test_of_a_hub_model_only_the_files_with_the_head_are_downloaded(tmp_path: Path, hub: Hub) -> None:
    raw = write(tmp_path / "raw", "moe", shards=9)
    hub.models["org/original"] = raw
    lost = stripped(raw, tmp_path / "lost", bits=4)
    result = CliRunner().invoke(app, ["graft", str(lost), "--from", "org/original", "--dry-run"])
    assert result.exit_code == 0, result.output
    weight_map = json.loads((raw / INDEX).read_text())["weight_map"]
    wanted = sorted({file for name, file in weight_map.items() if name.startswith("mtp.")})
    size = sum((raw / file).stat().st_size for file in wanted)
    assert f"{len(wanted)} files, {size:,} bytes would be downloaded" in result.output
    assert not [file for file in hub.downloaded if file.endswith(".safetensors")]
    assert not read_layout(lost).mtp.available

    result = CliRunner().invoke(app, ["graft", str(lost), "--from", "org/original"])
    assert result.exit_code == 0, result.output
    assert sorted(file for file in hub.downloaded if file.endswith(".safetensors")) == wanted
    assert 0 < len(wanted) < 9
    total = sum(path.stat().st_size for path in raw.glob("*.safetensors"))
    assert (
        sum((raw / file).stat().st_size for file in hub.downloaded if file.endswith(".safetensors")) == size < total
    )
    kept = converted(raw, tmp_path / "kept", bits=4)
    assert (lost / SIDECAR).read_bytes() == (kept / SIDECAR).read_bytes()


def test_of_a_hub_model_the_final_norm_is_compared_before_the_head_is_downloaded(tmp_path: Path, hub: Hub) -> None:
    names = {"org/original": 0, "org/other": 1}
    for name, seed in names.items():
        hub.models[name] = write(tmp_path / name, "dense", shards=20, seed=seed)
    lost = stripped(hub.models["org/original"], tmp_path / "lost")
    result = CliRunner().invoke(app, ["graft", str(lost), "--from", "org/other"])
    assert result.exit_code == 1
    assert "org/other: another model of the same sizes: its final norm (norm.weight) is not that of" in result.stderr
    assert not [file for file in hub.downloaded if file.endswith(".safetensors")]
    assert CliRunner().invoke(app, ["graft", str(lost), "--from", "org/original"]).exit_code == 0
    weight_map = json.loads((hub.models["org/original"] / INDEX).read_text())["weight_map"]
    assert weight_map["model.language_model.norm.weight"] not in hub.downloaded


def test_of_a_folder_only_the_files_with_the_head_are_opened(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", "moe", shards=9)
    lost = stripped(raw, tmp_path / "lost", bits=4)
    weight_map = json.loads((raw / INDEX).read_text())["weight_map"]
    wanted = {file for name, file in weight_map.items() if name.startswith("mtp.")}
    for file in raw.glob("*.safetensors"):
        if file.name not in wanted:
            file.write_bytes(b"")  # opening it fails
    assert grafted(lost, raw)
    assert read_layout(lost).mtp.available


def test_the_original_is_known_from_the_readme(tmp_path: Path, hub: Hub) -> None:
    hub.models["org/original"] = raw = write(tmp_path / "raw", "dense")
    lost = stripped(raw, tmp_path / "lost")
    (lost / "README.md").write_text("---\nbase_model: org/original\n---\n")
    assert CliRunner().invoke(app, ["graft", str(lost)]).exit_code == 0
    assert read_layout(lost).mtp.available
    (lost / "README.md").unlink()
    shutil.rmtree(lost / "mtp")
    result = CliRunner().invoke(app, ["graft", str(lost)])
    assert result.exit_code == 1
    assert "Name the original with --from" in result.stderr


# -- refusals, each with its own message


def refused(model: Path, source: Path, message: str, **how: Any) -> None:
    before = contents(model)
    with pytest.raises((HeadError, CheckpointError), match=message):
        grafted(model, source, **how)
    assert contents(model) == before


def test_a_head_of_another_number_of_experts_is_refused(tmp_path: Path) -> None:
    pruned = write(tmp_path / "pruned", "moe", num_experts=6)
    lost = stripped(write(tmp_path / "raw", "moe"), tmp_path / "lost")
    refused(lost, pruned, r"pruned: another model, its num_experts is 6 and that of .*lost is 8\. .*merged or pruned")
    # config.json may hide it
    config = json.loads((pruned / "config.json").read_text())
    config["text_config"]["num_experts"] = 8
    (pruned / "config.json").write_text(json.dumps(config))
    refused(lost, pruned, r"does not fit .*has 6 experts, config.json says 8")


def test_the_head_of_another_model_is_refused(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", "dense")
    lost = stripped(raw, tmp_path / "lost", bits=4)
    refused(lost, write(tmp_path / "wide", "dense", hidden_size=128), r"wide: another model, its hidden_size is 128")
    refused(lost, write(tmp_path / "moe", "moe"), r"moe: another model, qwen3_5_moe where .* is qwen3_5\.")
    narrow = write(tmp_path / "narrow", "dense", num_key_value_heads=1)
    refused(lost, narrow, r"narrow: its MTP head does not fit .*k_proj.weight has shape")


def test_a_source_without_a_head_is_refused(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", "next")
    lost = stripped(raw, tmp_path / "lost")
    refused(
        lost, write(tmp_path / "none", "next", head=False), r"none: has no MTP head, config.json promises one but"
    )
    bare = write(tmp_path / "bare", "next", head=False, num_nextn_predict_layers=0)
    refused(lost, bare, r"bare: has no MTP head, config.json promises none and")


def test_a_model_that_needs_no_head_is_refused(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", "dense")
    refused(raw, raw, r"raw: not converted to MLX")
    refused(converted(raw, tmp_path / "kept"), raw, r"kept: has its head already, in mtp/weights.safetensors")
    result = CliRunner().invoke(app, ["graft", str(tmp_path / "kept")])  # nothing says what it was made from
    assert "kept: has its head already" in result.stderr


def test_a_read_only_model_is_named(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", "dense")
    plan = plan_graft(read_layout(stripped(raw, tmp_path / "lost")), raw)
    message = r"read-only cannot be written to \(.*\)"
    with read_only_folder(tmp_path / "read-only") as folder, pytest.raises(CheckpointError, match=message):
        graft(replace(plan, model=replace(plan.model, path=folder)))


def test_a_full_disk_leaves_the_model_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = write(tmp_path / "raw", "moe")
    made = stripped(raw, tmp_path / "made", bits=4)
    with small_disk(tmp_path / "disk", "4m") as disk:
        lost = Path(shutil.copytree(made, disk / "lost"))
        before = contents(lost)
        (disk / "ballast").write_bytes(b"x" * (shutil.disk_usage(disk).free - 50_000))
        with pytest.raises(CheckpointError, match=r"bytes will be written and the disk has"):
            grafted(lost, raw)
        monkeypatch.setattr("headstart.checkpoint.graft.require_space", lambda *_: None)
        with pytest.raises(CheckpointError, match=r"the disk is full\. Nothing was left behind"):
            grafted(lost, raw)
        assert contents(lost) == before
        assert not (lost / "mtp").exists()


# -- whole or not at all


@pytest.mark.parametrize("moves", range(3))
def test_between_any_two_moves_the_folder_is_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    raw = write(tmp_path / "raw", "moe")
    lost = stripped(raw, tmp_path / "lost", bits=4)
    done: list[Path] = []

    def stops(file: Path, destination: Path) -> None:
        if len(done) == moves:
            raise KeyboardInterrupt
        done.append(destination)
        move(file, destination)

    move = headstart.checkpoint.graft.replace_file
    monkeypatch.setattr("headstart.checkpoint.graft.replace_file", stops)
    if moves == 2:
        grafted(lost, raw)
    else:
        with pytest.raises(KeyboardInterrupt):
            grafted(lost, raw)
    assert len(done) == moves
    assert read_layout(lost).mtp.available == (moves == 2)
    load_in_mlx_lm(lost)
    assert not [path for path in lost.rglob("*") if ".headstart-" in path.name]


def graft_in_a_child(model: Path, source: Path) -> None:
    graft(plan_graft(read_layout(model), source))


@pytest.mark.slow  # `test_between_any_two_moves_…` and test_disk_trouble.py choose the moment
def test_killed_at_any_moment_the_model_has_its_head_or_not(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", "moe", num_hidden_layers=8)
    lost = stripped(raw, tmp_path / "lost", bits=4)
    before, original = contents(lost), contents(raw)
    whole = Path(shutil.copytree(lost, tmp_path / "whole"))
    complete = contents(grafted(whole, raw))
    interrupted = 0
    for finished in killed_at_random(graft_in_a_child, lost, raw, times=10):
        layout = read_layout(lost)
        load_in_mlx_lm(lost)
        interrupted += not finished
        found = {name: content for name, content in contents(lost).items() if ".headstart-" not in name}
        if layout.mtp.available:
            file = layout.mtp.location or ""
            assert found[file] == complete[file]
        if finished:
            assert found == complete
        for path in lost.rglob("*mtp*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name, content in before.items():
            (lost / name).write_bytes(content)
    assert interrupted
    assert contents(raw) == original
    assert contents(grafted(lost, raw)) == complete
