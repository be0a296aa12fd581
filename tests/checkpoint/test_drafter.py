"""Block drafters on disk: what fits a model is read, quantised and described; what does not is refused by name."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from typer.testing import CliRunner

from checkpoints import save, write, write_drafter
from headstart import load
from headstart.checkpoint import load_model, resolve
from headstart.checkpoint.drafter import convert_drafter, read_drafter
from headstart.checkpoint.load import _nbytes
from headstart.checkpoint.quantize import Recipe
from headstart.cli import serve, show
from headstart.cli.machines import load_share
from headstart.cli.main import app
from headstart.engine import Engine, Stats
from headstart.errors import DrafterError, HeadstartError
from headstart.models.memory import Footprint
from headstart.server.model_pool import ModelPool
from headstart.server.server import Server
from loopback_hub import running_hub


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("target"))


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"hidden_size": 32}, "its hidden_size is 32, and the hidden_size of .* is 64"),
        ({"vocab_size": 128}, "its vocab_size is 128, and the vocab_size of .* is 256"),
        ({"num_hidden_layers": 8}, "its num_target_layers is 8, and the num_hidden_layers of .* is 4"),
    ],
)
def test_a_drafter_for_another_model_is_refused(target: Path, tmp_path: Path, other: Any, message: str) -> None:
    drafter = write_drafter(tmp_path / "drafter", write(tmp_path / "other", **other))
    with pytest.raises(DrafterError, match=f"a drafter for another model: {message}.* Name the drafter"):
        load_model(target, drafter=drafter)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mask_token_id": 256}, "mask_token_id is 256; it must be a whole number from 0 to 255"),
        ({"mask_token_id": None}, "mask_token_id is None; it must"),
        ({"target_layer_ids": [0, 4]}, r"target_layer_ids is \[0, 4\]; they must rise, from 0 to 3"),
        ({"target_layer_ids": [2, 0]}, r"target_layer_ids is \[2, 0\]; they must rise"),
        ({"target_layer_ids": "all"}, "target_layer_ids is 'all'; it must be a list of layers"),
        ({"target_layer_ids": None}, "not a block drafter's: it has no target_layer_ids"),
        ({"block_size": 1}, "block_size is 1; it must be a whole number from 2"),
        ({"architectures": ["DSparkDraftModel"]}, "DSparkDraftModel.*, and Headstart runs DFlashDraftModel and DFl"),
        ({"architectures": ["DFlash2DraftModel"]}, "conv_kernel_size is None; it must be a whole number from 1"),
        ({"layer_types": ["full_attention"]}, "layer_types is .*; it must name"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window is None, and some layers slide"),
        ({"num_hidden_layers": 3, "layer_types": None}, r"11 tensors missing \(layers\.2\."),
        ({"head_dim": "wide"}, "head_dim is 'wide'"),
    ],
)
def test_a_wrong_config_is_refused_by_its_field(target: Path, tmp_path: Path, fields: Any, message: str) -> None:
    drafter = write_drafter(tmp_path, target, flat=True, **fields)
    with pytest.raises(HeadstartError, match=message):
        load_model(target, drafter=drafter)


def test_a_layer_beyond_the_model_is_refused_where_config_says_no_number_of_layers(tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path / "drafter", write(tmp_path / "long", num_hidden_layers=8), layers=(1, 6))
    config = json.loads((drafter / "config.json").read_text())
    del config["num_target_layers"]
    (drafter / "config.json").write_text(json.dumps(config))
    with pytest.raises(DrafterError, match=r"num_target_layers is 'above 6', and the num_hidden_layers of .* is 4"):
        load_model(write(tmp_path / "short"), drafter=drafter)


def test_missing_and_unknown_tensors_are_refused(target: Path, tmp_path: Path) -> None:
    for change, message in (({"fc.weight": None}, r"1 tensor missing \(fc\.weight\)"), ({"x.weight": 1}, "unknown")):
        drafter = write_drafter(tmp_path, target)
        arrays: Any = {**mx.load(str(drafter / "model.safetensors")), **{name: mx.zeros((2, 2)) for name in change}}
        save(drafter / "model.safetensors", {n: a for n, a in arrays.items() if change.get(n, a) is not None}, {})
        with pytest.raises(DrafterError, match=message):
            load_model(target, drafter=drafter)


def test_a_model_and_a_drafter_are_not_each_other(target: Path, tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match="not a block drafter's: it has no target_layer_ids"):
        load_model(target, drafter=target)


def test_a_drafter_that_does_not_fit_in_memory_is_refused(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, one = write_drafter(tmp_path, target), load_model(target, dtype=mx.float32)
    pair = load_model(target, drafter=drafter, dtype=mx.float32)
    # Keys and values of two layers with two heads of 16: counted for every position, at admission too.
    assert Footprint.of(pair).position - Footprint.of(one).position == 2 * 2 * 2 * 16 * 4
    assert Engine(pair).scheduler.footprint == Footprint.of(pair)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 0)
    needed = _nbytes(one.weights, mx.float32) + Footprint.of(pair).bytes([1]) / 0.9
    monkeypatch.setenv("HEADSTART_MEMORY_GB", str((needed + read_drafter(drafter).bytes) / 1e9))
    load_model(target, dtype=mx.float32)
    with pytest.raises(
        HeadstartError, match=r"GB \(its drafter's 0\.00 of them\), and .*Leave the drafter out, take a"
    ):
        load_model(target, drafter=drafter, dtype=mx.float32)  # twice as large as in the file


def test_a_drafter_is_quantised_and_drafts_nearly_the_same(target: Path, tmp_path: Path) -> None:
    drafter, small = write_drafter(tmp_path / "drafter", target), tmp_path / "small"
    assert "not written" in run("convert", drafter, small, "--bits", 8, "--group-size", 32, "--dry-run")
    assert not small.exists()
    run("convert", drafter, small, "--bits", 8, "--group-size", 32)
    logits = []
    for folder in (drafter, small):
        model, _ = load(target, drafter=folder)
        state = model.make_state(1)
        model.trunk(mx.array([[1, 2, 3]]), state, certain=3)
        state.commit(mx.array([3]), most=3)
        logits.append(model.block_logits(mx.array([4]), 3, state)[0])
    assert mx.allclose(*logits, atol=0.5)
    assert not mx.array_equal(*logits)
    report = json.loads(run("inspect", small, "--json"))
    assert report["quantization"] == {"bits": 8, "group_size": 32, "mode": "affine"}
    with pytest.raises(DrafterError, match="quantised already"):
        convert_drafter(read_drafter(small), tmp_path / "again", Recipe(mx.bfloat16, 4))


def test_inspect_says_what_a_drafter_is_for(target: Path, tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path, target)
    report = json.loads(run("inspect", drafter, "--json"))
    assert report["family"] == "dflash"
    assert (report["block_size"], report["mask_token_id"], report["target_layer_ids"]) == (16, 255, [0, 2])
    assert report["target"] == {"hidden_size": 64, "vocab_size": 256, "num_hidden_layers": 4}
    table = run("inspect", drafter)
    assert "hidden_size 64, vocab_size 256, num_hidden_layers 4" in table


def test_commands_take_a_drafter_from_the_hub(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_hub(monkeypatch, tmp_path / "cache") as hub:
        hub.models["org/drafter"] = write_drafter(tmp_path / "drafter", target)
        assert '"family": "dflash"' in run("inspect", "org/drafter", "--json")
        assert "model.safetensors" not in hub.downloaded
        asked = ["generate", target, "--drafter", "org/drafter", "--raw", "-p", "a", "-n", 12, "--json"]
        plain = json.loads(run(*asked, "--k", 0).splitlines()[-1])
        drafted = json.loads(run(*asked, "--k", 7).splitlines()[-1])
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["stats"]["drafter_kind"] == "dflash+native_mtp"
    assert drafted["stats"]["proposed_by_source"]["drafter"] > 0


def test_chat_bench_and_serve_take_a_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, answers = write_drafter(tmp_path, resolve("tiny-qwen3.5"), layers=(0, 1)), list[Stats]()
    monkeypatch.setattr(show, "summary", lambda stats, finish_reason: answers.append(stats) or "")
    result = CliRunner().invoke(app, ["chat", "--drafter", str(drafter), "-n", "8", "--k", "12"], input="a\n")
    assert result.exit_code == 0, result.output
    assert answers[0].proposed_by_source["drafter"] == answers[0].proposed_draft_tokens > 0
    measured = [
        "--temperature",
        0,
        "--k",
        "0,12",
        "--batch-size",
        1,
        "-n",
        20,
        "--repeats",
        1,
        "--prompts",
        "code",
        "--json",
    ]
    report = json.loads(run("bench", "--drafter", drafter, *measured))
    assert [each["variant"] for each in report["measurements"] if each["identical"]] == ["k=0", "k=12"]
    pools: list[ModelPool] = []
    monkeypatch.setattr(Server, "wait", lambda self, announce: announce())
    monkeypatch.setattr(serve, "_load", lambda server, state, pool, model: pools.append(pool))
    run("serve", "--drafter", drafter, "--port", 0)
    assert [model.drafter for model in pools[0].models] == [{"kind": "dflash", "max_k": 15}]


def test_several_machines_refuse_a_drafter(target: Path, tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path, target)
    machines: Any = SimpleNamespace(comm=None)
    with pytest.raises(DrafterError, match="run on one machine only"):
        load_share(target, machines, "tensor", mtp=None, head=None, drafter=str(drafter), kv_bits=None)


def test_probe_finds_a_random_drafter_unsound_and_its_text_right(tmp_path: Path) -> None:
    target = write(tmp_path / "target", vocab_size=8192)
    drafter = write_drafter(tmp_path / "drafter", target, layers=(0, 1))
    asked = ["probe", str(target), "--drafter", str(drafter), "--k", "1", "--tokens", "20", "--json"]
    result = CliRunner().invoke(app, asked)
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert report["identical"]
    assert report["model"]["drafter"] == drafter.name
    assert report["first_draft_acceptance"] < 0.2
    assert report["remedy"] == "Name the drafter that was released for this model."
