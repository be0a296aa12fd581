import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from checkpoints import write
from families import write_family
from headstart.cli.main import app
from vision_models import write_with_tower

KEYS = [
    "path",
    "family",
    "layout",
    "dtype",
    "quantization",
    "parameters",
    "bytes",
    "forward",
    "native_mtp",
    "vision",
    "tables",
    "index",
    "entries",
    "streams",
    "card",
    "known_drafter",
]
MTP_KEYS = ["available", "reason", "location", "num_layers", "quantization"]


def inspect(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["inspect", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_json_is_one_object_with_the_promised_fields(tmp_path: Path) -> None:
    write(tmp_path, "moe", "converted", bits=4)
    report = json.loads(inspect(str(tmp_path), "--json"))
    assert list(report) == KEYS
    assert list(report["native_mtp"]) == MTP_KEYS
    assert report["path"] == str(tmp_path)
    assert (report["family"], report["layout"], report["dtype"]) == ("qwen3_5_moe", "converted", "bfloat16")
    assert report["quantization"] == {"bits": 4, "group_size": 64, "mode": "affine"}
    assert report["native_mtp"]["available"] is True
    assert (report["vision"]["available"], report["vision"]["parameters"]) == (False, 0)
    assert report["card"] is None


def test_the_index_of_selected_tokens_is_shown(tmp_path: Path) -> None:
    write_family(tmp_path, "glm_moe_dsa")
    size = 4 * (48 * 16 * 32 + 64 * 32 + 2 * 32 + 64 * 16)  # of wq_b, wk, k_norm and weights_proj, in float32
    report = json.loads(inspect(str(tmp_path), "--json"))
    assert report["index"] == {"layers": 4, "bytes": 4 * size}  # of three layers, and of the head
    assert f"4 layers, {4 * size:,} bytes" in inspect(str(tmp_path))


def test_a_vision_tower_is_shown(tmp_path: Path) -> None:
    write_with_tower(tmp_path)
    report = json.loads(inspect(str(tmp_path), "--json"))
    assert (report["vision"]["available"], report["vision"]["reason"]) == (True, None)
    assert f"{report['vision']['parameters']:,} parameters" in inspect(str(tmp_path))


def test_the_builtin_model_is_the_default() -> None:
    report = json.loads(inspect("--json"))
    assert report["path"].endswith("tiny-qwen3.5")
    assert report["parameters"] == 20_468_832
    assert report["native_mtp"] == dict(
        zip(MTP_KEYS, [True, None, "model-00003-of-00003.safetensors", 1, None], strict=True)
    )


def test_the_table_shows_the_same(tmp_path: Path) -> None:
    write(tmp_path, "dense", "converted", bits=4)
    table = inspect(str(tmp_path))
    for word in ("qwen3_5", "converted", "bfloat16", "4 bits, groups of 64, affine", "available"):
        assert word in table


def test_the_command_that_fixes_a_stripped_model_is_printed(tmp_path: Path) -> None:
    write(tmp_path, "dense", "stripped")
    printed = "".join(line.split("reason", 1)[-1].strip() + " " for line in inspect(str(tmp_path)).splitlines())
    assert "not available" in printed
    assert "headstart graft" in printed
    assert "--from ORIGINAL" in printed


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_an_error_is_one_line_on_stderr(tmp_path: Path, flags: list[str]) -> None:
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "nowhere"), *flags])
    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {tmp_path / 'nowhere'}: no such folder")
