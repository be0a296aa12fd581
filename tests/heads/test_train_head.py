"""A training from its start to a head that drafts, and what may go wrong on the way."""

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from typer.testing import CliRunner

from checkpoints import write
from disks import small_disk
from families import write_family
from fixtures import generate
from headstart.checkpoint import load_model, read_layout
from headstart.checkpoint.quantize import Recipe
from headstart.cli.main import app
from headstart.errors import CheckpointError, HeadError, RequestError
from headstart.training import train as training
from headstart.training.head import require_trainable
from headstart.training.store import State, quality
from headstart.training.text import Row, append_rows, read_traffic, shipped_prompts
from headstart.training.train import Status, TrainingPlan, train

STEPS = 8
ENDLESS = 1e6  # minutes: the steps end a training here


def plan(model: Path, out: Path, **fields: Any) -> TrainingPlan:
    return TrainingPlan(read_layout(model), out, ENDLESS, Recipe(mx.float32), **{"most_steps": STEPS} | fields)


def quietly(status: Status) -> None:
    pass


def run(*command: str | Path) -> Any:
    return CliRunner().invoke(app, [str(word) for word in command])


def state_of(out: Path) -> State:
    file = out / "training" / "state.safetensors"
    if not file.exists():
        return State()
    _, about = mx.load(str(file), return_metadata=True)
    return State(**json.loads(about["state"]))


@pytest.fixture(scope="module")
def trained(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("heads") / "head"
    with pytest.MonkeyPatch.context() as patch:
        from make_small import make_small

        from headstart.training import text

        make_small(patch.setattr, text, training)
        _, after = train(plan(llama, out, most_steps=24), quietly)
    assert after[1] < math.log(12288) - 0.3  # the loss of the first draft; before it is far above chance's
    return out


def test_the_head_is_loaded_and_drafts_as_its_card_says(llama: Path, trained: Path) -> None:
    layout = read_layout(llama, trained)
    assert layout.mtp.available
    assert layout.head_card is not None
    assert len(layout.head_card.acceptance) == 3
    assert layout.dispatch().k == layout.head_card.default_k
    model, plain = load_model(llama, head=trained), load_model(llama)
    prompt = [5, 17, 130, 44, 201]
    for k in (1, 3, 8):
        answer = generate(model, prompt, temperature=0, max_tokens=24, k=k)
        assert answer.tokens == generate(plain, prompt, temperature=0, max_tokens=24, k=0).tokens
        assert answer.stats is not None
        assert sum(answer.stats.proposed_by_position) > 0


def test_it_is_grafted_into_a_model_as_released(llama: Path, trained: Path, tmp_path: Path) -> None:
    model = write_family(tmp_path / "llama", "llama", vocab_size=12288)
    assert run("graft", model, "--from", trained).exit_code == 0
    layout = read_layout(model)
    assert layout.mtp.available
    assert layout.head_card == read_layout(llama, trained).head_card


def test_a_conversion_takes_it_along(llama: Path, trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "four"
    assert run("convert", llama, out, "--bits", 4, "--head", trained).exit_code == 0
    layout = read_layout(out)
    assert layout.mtp.available
    assert layout.head_card is not None
    assert load_model(out).has_head


def test_going_on_from_a_head_reports_before_and_after(llama: Path, tmp_path: Path) -> None:
    train(plan(llama, tmp_path / "poor", most_steps=1), quietly)
    before, after = train(plan(llama, tmp_path / "more", head=tmp_path / "poor", most_steps=16), quietly)
    assert quality(after) > quality(before)


def test_a_head_that_got_no_better_is_not_written(
    llama: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "RATE", 0.0)
    with pytest.raises(HeadError, match="did not make it better"):
        train(plan(llama, tmp_path / "same", head=trained, most_steps=1), quietly)
    assert not (tmp_path / "same" / "config.json").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
import mlx.core as mx
from headstart.checkpoint import read_layout
from headstart.checkpoint.quantize import Recipe
from headstart.training import text, train
from make_small import make_small
make_small(setattr, text, train)
model, out, doing, times = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
seen = 0
def report(status):
    global seen
    seen += status.doing == doing
    if seen == times:
        os.kill(os.getpid(), signal.SIGKILL)
train.train(train.TrainingPlan(read_layout(model), out, 1e6, Recipe(mx.float32), most_steps=8), report)
"""


def killed(model: Path, out: Path, doing: str, times: int) -> int:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", KILLED, str(model), str(out), doing, str(times)]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True).returncode


@pytest.mark.parametrize(
    ("doing", "times"), [pytest.param("writing text", 1, marks=pytest.mark.slow), ("training", 3)]
)
def test_a_killed_training_goes_on(llama: Path, tmp_path: Path, doing: str, times: int) -> None:
    out = tmp_path / "head"
    assert killed(llama, out, doing, times) == -signal.SIGKILL
    assert not (out / "config.json").exists()
    held = (out / "training" / "held-out.jsonl").read_bytes()
    file = out / "training" / "text.jsonl"
    text = file.read_bytes() if file.exists() else b""
    steps = state_of(out).steps
    file.write_bytes(text + b'{"vocabulary": 12288, "pro')  # what a kill may leave of a line
    train(plan(llama, out), quietly)
    assert (out / "training" / "held-out.jsonl").read_bytes() == held
    assert file.read_bytes().startswith(text)
    assert b"pro{" not in file.read_bytes()
    assert state_of(out).steps == STEPS > steps
    assert load_model(llama, head=out).has_head


def test_ctrl_c_writes_a_checkpoint(llama: Path, tmp_path: Path) -> None:
    out, reports = tmp_path / "head", iter(range(3))

    def interrupt(status: Status) -> None:
        if status.doing == "training" and next(reports) == 2:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(plan(llama, out), interrupt)
    assert state_of(out).steps == 3


@pytest.mark.parametrize("kilobytes", [150, 800])  # for the first checkpoint, and for two
def test_a_full_disk_is_named_and_loses_nothing(llama: Path, tmp_path: Path, kilobytes: int) -> None:
    with small_disk(tmp_path / "small", f"{kilobytes}k") as disk:
        out = disk / "head"
        with pytest.raises(CheckpointError, match="disk is full"):
            train(plan(llama, out), quietly)
        assert not (out / "config.json").exists()
        kept = {path.name for path in (out / "training").iterdir()}
        assert "held-out.jsonl" in kept
        assert not any(".new." in name for name in kept)
        subprocess.run(["mount", "-o", "remount,size=200m", disk], check=True)
        train(plan(llama, out), quietly)
        assert load_model(llama, head=out).has_head


def test_without_a_chat_template_prompts_are_texts(tmp_path: Path) -> None:
    model = write_family(tmp_path / "base", "llama", vocab_size=12288)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    train(plan(model, tmp_path / "head", most_steps=1), quietly)
    assert load_model(model, head=tmp_path / "head").has_head


def test_a_head_of_another_vocabulary_is_refused(llama: Path, trained: Path, tmp_path: Path) -> None:
    other = write_family(tmp_path / "other", "llama", vocab_size=16384)
    with pytest.raises(HeadError, match="vocab_size"):
        train(plan(other, tmp_path / "head", head=trained), quietly)


def test_the_folder_of_another_training_is_refused(llama: Path, trained: Path, tmp_path: Path) -> None:
    other = write_family(tmp_path / "other", "llama", vocab_size=16384)
    with pytest.raises(CheckpointError, match="vocab_size is 12288, and now 16384"):
        train(plan(other, trained), quietly)
    with pytest.raises(CheckpointError, match="is no training"):
        train(plan(other, llama), quietly)


def test_conversations_train_it_and_those_of_another_vocabulary_are_refused(llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "traffic.jsonl"
    rows = [Row(4, [(7 * number + at) % 300 for at in range(20)]) for number in range(10)]
    append_rows(file, rows, 12288)
    own, held = read_traffic(file, 12288)
    assert sorted([*own, *held], key=lambda row: row.tokens) == sorted(rows, key=lambda row: row.tokens)
    assert len(held) == 1
    train(plan(llama, tmp_path / "head", traffic=file, most_steps=2), quietly)
    assert "recorded conversations" in (tmp_path / "head" / "mtp" / "card.toml").read_text()
    with pytest.raises(RequestError, match="of a model with 12288 tokens, and this one has 9"):
        read_traffic(file, 9)


def test_other_families_are_refused_by_name(tmp_path: Path) -> None:
    layout = read_layout(write_family(tmp_path / "mimo", "mimo"))
    with pytest.raises(HeadError, match="no head is trained for mimo"):
        require_trainable(layout)


def test_a_quantised_model_gets_a_head_in_8_bits(tmp_path: Path) -> None:
    model = write(tmp_path / "model", "dense", "stripped", bits=4, vocab_size=12288, hidden_size=64)
    four = replace(plan(model, tmp_path / "head", most_steps=1), recipe=Recipe(mx.bfloat16, 4, 64))
    train(four, quietly)
    layout = read_layout(model, tmp_path / "head")
    assert layout.mtp.quantization == {"group_size": 64, "bits": 8, "mode": "affine"}


def test_prompts_to_measure_with_are_not_trained_on() -> None:
    prompts, held = shipped_prompts()
    assert len(set(prompts)) > 400
    assert len(set(held)) > 40
    assert not set(prompts) & set(held)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "is no prompt"),
        ("word", "is no prompt"),
        ('{"text": "one"}', "has 1 prompts"),
        ('{"messages": [5]}', "no pr"),
    ],
)
def test_prompts_that_cannot_be_read_are_named(llama: Path, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "prompts").write_text(content)
    done = run("train-head", llama, "-o", tmp_path / "head", "--prompts", tmp_path / "prompts")
    assert done.exit_code == 1
    assert message in done.output
    assert not (tmp_path / "head").exists()
