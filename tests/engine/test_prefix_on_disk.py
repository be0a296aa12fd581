"""A prompt that an earlier process has read is resumed from the disk, if it would be computed the same."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

import headstart.engine.prefix_disk
from fixtures import Answer, collect, random_model, random_prompt, submit
from headstart.engine import Engine
from headstart.engine.prefix_disk import PrefixOptions, state_identity
from headstart.models import Model

C = 16  # tokens a chunk
LOTS = 1 << 28


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.kernels.backend.Backend.chunk", C)


def ask(model: Model, prompt: list[int], folder: Path | None) -> Answer:
    """The answer of a new process, and all that it leaves behind."""
    prefix = PrefixOptions(folder=folder, folder_bytes=LOTS).open(LOTS, model)
    assert prefix is not None
    prefix.chunk = C
    engine, disk = Engine(model, prefix=prefix), prefix.disk
    answer = collect(submit(engine, prompt, max_tokens=8, k=3))
    if disk is not None:
        assert disk.flush()
        disk.close()
    return answer


@pytest.mark.parametrize("family", ["dense", pytest.param("moe", marks=pytest.mark.slow)])
def test_an_answer_after_a_restart_is_the_same_bit_for_bit(family: str, tmp_path: Path) -> None:
    model = random_model(family)
    prompt = random_prompt(model, 4 * C + 6)
    expected = ask(model, prompt, None)
    for prompt_, hit in ((prompt, 0), (prompt, 4 * C), ([*prompt[: 4 * C + 2], 1, 2], 4 * C)):
        answer = ask(model, prompt_, tmp_path)
        assert answer.stats is not None
        assert answer.stats.prefix_cache_hit == hit
        assert answer.stats.exact
        assert answer.bursts == (expected if prompt_ is prompt else ask(model, prompt_, None)).bursts


def test_other_weights_kernels_and_versions_find_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = random_model("dense"), random_model("dense", seed=1)
    identity = state_identity(model)
    assert state_identity(model) == identity
    assert state_identity(other) != identity
    with monkeypatch.context() as patch:
        patch.setattr(headstart.engine.prefix_disk, "version", lambda name: "0.0")
        assert state_identity(model) != identity
    assert state_identity(replace(model, backend=model.backend.stock())) != identity
    norm = model.weights.mtp.norm.weight  # of the head: the trunk does not show it
    before = mx.array(norm)
    try:
        norm[0] = norm[0] * 1.001
        assert state_identity(model) != identity
    finally:
        norm[:] = before
    assert state_identity(model) == identity


def test_a_folder_that_cannot_be_used_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "thesis.txt").write_text("irreplaceable")
    prefix = PrefixOptions(folder=tmp_path, folder_bytes=LOTS).open(LOTS, random_model("dense"))
    assert prefix is not None
    assert prefix.disk is None
    assert "holds other files" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
