"""What ends a process while kernels are checked is not tried by the next, and what hangs ends."""

import json
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from headstart.kernels.metal import choice, trials
from headstart.kernels.metal.choice import Operation, checks, choose
from headstart.kernels.metal.trials import Trials


def in_a_child(run: Callable[[], object]) -> int:
    """Return how a process ended that ran this."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads are not there: the child needs none
        child = os.fork()
    if not child:
        try:
            run()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def crash(folder: Path, valid_for: str = "Apple M1") -> None:
    """End in a trial as a crash of the driver, or of the machine, would end it."""

    def run() -> None:
        trials = Trials(folder, valid_for)
        with trials.trying("norm 64", "stock"):
            pass
        with trials.trying("product 12", "metal"):
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_child(run) == -signal.SIGKILL


def refused(folder: Path, valid_for: str = "Apple M1") -> list[str | None]:
    trials = Trials(folder, valid_for)
    try:
        return [trials.refusal(*each) for each in (("norm 64", "stock"), ("product 12", "metal"))]
    finally:
        trials.close()


def test_what_ended_a_process_is_not_tried_again(tmp_path: Path) -> None:
    crash(tmp_path)
    for _ in range(2):  # and not forgotten by the one after
        norm, product = refused(tmp_path)
        assert norm is None
        assert (product or "").startswith("crashed: the process or the machine ended when it was tried; ")
    assert [path.name for path in tmp_path.iterdir()] == ["crashed.json"]
    (tmp_path / "crashed.json").unlink()
    assert refused(tmp_path) == [None, None], "as the message says"


def test_another_chip_system_or_release_tries_it_again(tmp_path: Path) -> None:
    crash(tmp_path, "Apple M1, mlx 1")
    assert refused(tmp_path, "Apple M1, mlx 2") == [None, None]


def test_a_trial_of_a_process_that_lives_is_no_crash(tmp_path: Path) -> None:
    other = Trials(tmp_path, "Apple M1")
    with other.trying("product 12", "metal"):
        assert refused(tmp_path) == [None, None]
        assert json.loads(next(tmp_path.glob("trying-*")).read_text())["candidate"] == "metal"
    with pytest.raises(KeyboardInterrupt), other.trying("product 12", "metal"):
        raise KeyboardInterrupt
    assert next(tmp_path.glob("trying-*")).read_text() == ""
    other.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"for": "Apple M1"}'])
def test_a_damaged_note_says_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "trying-abc").write_text(text)
    (tmp_path / "crashed.json").write_text(text)
    assert refused(tmp_path) == [None, None]


def test_a_folder_that_others_may_write_to_is_not_believed(tmp_path: Path) -> None:
    crash(tmp_path)
    tmp_path.chmod(0o777)
    assert refused(tmp_path) == [None, None]


def test_what_hangs_ends_the_process_and_is_not_tried_by_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ended = []
    hung = Trials(tmp_path, "Apple M1", longest=0.0, end=lambda: ended.append(os.getpid()))
    with hung.trying("product 12", "metal"):
        while not ended:
            pass
    assert "metal of product 12 did not end within 0 s" in caplog.text
    hung.close()

    def hang() -> None:
        with Trials(tmp_path, "Apple M1", longest=0.0).trying("product 12", "metal"):
            time.sleep(60)

    assert in_a_child(hang) == 70
    assert refused(tmp_path)[1] is not None


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(choice, "_decided", {})
    monkeypatch.setattr(choice, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(choice, "identity", lambda: "Apple M1")
    return tmp_path


def product(
    run: Callable[[slice, slice], mx.array], fused: Callable[[slice, slice], mx.array] | None = None
) -> Operation:
    def stock(b: slice, w: slice) -> mx.array:
        return mx.ones((16, 1, 4))[b, w]

    return Operation("product", "12", lambda: {"stock": (stock,), "metal": (run, fused or run)})


def boom(b: slice, w: slice) -> mx.array:
    raise AssertionError("tried")


@pytest.mark.parametrize("in_turns", [False, True])
def test_a_crashed_candidate_is_left_out_of_the_choice(mac: Path, in_turns: bool) -> None:
    what = choice.TIMING if in_turns else "metal"
    (mac / "crashed.json").write_text(json.dumps({"Apple M1": [["product 12", what]]}))
    choose([product(boom)])
    (check,) = checks()
    assert (check.chosen, check.exact) == ("stock", True)
    (excluded,) = check.excluded
    assert excluded.startswith("product 12: metal crashed: ")


def test_where_mlx_itself_crashed_nothing_is_tried(mac: Path) -> None:
    (mac / "crashed.json").write_text(json.dumps({"Apple M1": [["product 12", "stock"]]}))
    choose([product(boom)])
    assert [(each.chosen, each.exact) for each in checks()] == [("stock", False)]


def test_what_is_slower_is_not_compiled_in_all_its_forms(mac: Path) -> None:
    seconds = {"stock": 1.0, "metal": 2.0}
    now = [0.0]

    def timed(name: str) -> Callable[[slice, slice], mx.array]:
        def run(b: slice, w: slice) -> mx.array:
            now[0] += seconds[name]
            return mx.ones((16, 1, 4))[b, w]

        return run

    operation = Operation("product", "12", lambda: {"stock": (timed("stock"),), "metal": (timed("metal"), boom)})
    choose([operation], clock=lambda: now[0])
    (check,) = checks()
    assert check.chosen == "stock"
    assert [(each.refused, each.exact) for each in check.candidates] == [(None, True), (None, None)]
    choice._decided.clear()
    (mac / "metal.json").unlink()
    seconds["stock"] = 3.0
    choose([operation], clock=lambda: now[0])
    assert checks()[0].candidates[1].refused == "failed: tried"


def test_each_trial_is_noted_before_it_begins(mac: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[str] = []

    def run(b: slice, w: slice) -> mx.array:
        noted.append(json.loads(next(mac.glob("trying-*")).read_text())["candidate"])
        return mx.ones((16, 1, 4))[b, w]

    choose([product(run)])
    assert set(noted) == {"metal", choice.TIMING}
    assert trials.CRASHED not in [path.name for path in mac.iterdir()]
