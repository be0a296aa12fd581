"""Choosing kernels on a Mac, with simulated devices: one per generation, and devices on which something is wrong."""

import json
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from headstart.kernels.metal.choice import TIMED, Choices, Decision, decide

WEIGHT = mx.random.normal((12, 32), key=mx.random.key(1))
ROWS = mx.random.normal((16, 32), key=mx.random.key(2))


class Device:
    """A simulated GPU: its own clock, on which each implementation takes so long by the number of rows."""

    def __init__(self) -> None:
        self.now = 0.0
        self.batches: dict[str, list[int]] = {}

    def clock(self) -> float:
        return self.now

    def product(
        self,
        name: str,
        seconds: Callable[[int], float],
        *,
        changes_at: int = 99,
        wrong: float = 0.0,
        fails: str | None = None,
        least: int = 1,
    ) -> Callable[[mx.array], mx.array]:
        """Return a product whose rounding changes from so many rows on."""

        def run(x: mx.array) -> mx.array:
            if fails is not None:
                raise RuntimeError(fails)
            rows = max(x.shape[0], least)
            self.now += seconds(rows)
            self.batches.setdefault(name, []).append(x.shape[0])
            y = mx.stack([(x[i][None] * WEIGHT).sum(axis=-1) for i in range(x.shape[0])]) + wrong
            return y * (1 + 1e-6) if rows >= changes_at else y

        return run


# Stock kernels by generation, from MLX's dispatch; ours reads weights once for up to six rows.
GENERATIONS = {
    # one kernel per row: exact, and twice the rows cost twice the time
    "M1": (
        {"stock": {"seconds": lambda rows: 1.0 * rows}, "ours": {"seconds": lambda rows: 1.1 + 0.05 * rows}},
        "ours",
    ),
    "M2, short rows": (
        {"stock": {"seconds": lambda rows: 0.2 * rows}, "ours": {"seconds": lambda rows: 2.0 + 0.1 * rows}},
        "stock",
    ),
    # another kernel from two rows on: only padding makes it exact
    "M3": (
        {
            "stock": {"seconds": lambda rows: 1.0 + 0.02 * rows, "changes_at": 2},
            "padded": {"seconds": lambda rows: 1.05 + 0.02 * rows, "least": 2, "changes_at": 2},
            "ours": {"seconds": lambda rows: 1.3 + 0.05 * rows},
        },
        "padded",
    ),
    "M4, ours faster": (
        {
            "stock": {"seconds": lambda rows: 1.0 + 0.3 * rows, "changes_at": 2},
            "padded": {"seconds": lambda rows: 1.2 + 0.3 * rows, "least": 2, "changes_at": 2},
            "ours": {"seconds": lambda rows: 1.0 + 0.05 * rows},
        },
        "ours",
    ),
    # its fast kernel changes again within the widths in use
    "M5": (
        {
            "stock": {"seconds": lambda rows: 0.5, "changes_at": 2},
            "padded": {"seconds": lambda rows: 0.6, "least": 2, "changes_at": 6},
            "ours": {"seconds": lambda rows: 1.0},
        },
        "ours",
    ),
}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_each_generation_gets_the_fastest_exact_kernel(generation: str) -> None:
    kinds, expected = GENERATIONS[generation]
    device = Device()
    decision = decide({name: device.product(name, **kind) for name, kind in kinds.items()}, ROWS, device.clock)
    assert (decision.chosen, decision.exact) == (expected, True)
    assert not decision.refused
    assert {name: len(times) for name, times in decision.seconds.items()} == dict.fromkeys(kinds, len(TIMED))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"fails": "Unable to build metal library\nerror: …"}, "failed: Unable to build metal library"),
        ({"wrong": 0.5}, "differs from stock ops"),
        ({"wrong": float("nan")}, "differs from stock ops"),
    ],
)
def test_a_kernel_that_fails_or_is_wrong_is_never_used(fault: dict, reason: str) -> None:  # type: ignore[type-arg]
    device = Device()
    candidates = {
        "stock": device.product("stock", lambda rows: 1.0 * rows, changes_at=2),
        "ours": device.product("ours", lambda rows: 0.01, **fault),
    }
    decision = decide(candidates, ROWS, device.clock)
    assert (decision.chosen, decision.exact) == ("stock", False)
    assert decision.refused["ours"].startswith(reason)
    assert "ours" not in decision.seconds


def test_a_faster_kernel_whose_rows_depend_on_their_number_is_not_chosen() -> None:
    device = Device()
    candidates = {
        "stock": device.product("stock", lambda rows: 1.0 * rows),
        "ours": device.product("ours", lambda rows: 0.01, changes_at=9),
    }
    assert decide(candidates, ROWS, device.clock).chosen == "stock"


def operations(device: Device, **kind: object) -> list:  # type: ignore[type-arg]
    def make() -> tuple[dict, mx.array]:  # type: ignore[type-arg]
        ours = device.product("ours", lambda rows: 0.1, **kind)  # type: ignore[arg-type]
        return {"stock": device.product("stock", lambda rows: 1.0 * rows), "ours": ours}, ROWS

    return [("product 12×32", make)]


def test_decisions_are_kept_until_chip_system_or_library_change(tmp_path: Path) -> None:
    device, path = Device(), tmp_path / "cache" / "metal.json"
    seen: list[str] = []
    first = Choices(path, "M2, macOS 15, mlx 1")
    first.tune(operations(device), lambda done, total, key: seen.append(f"{done}/{total} {key}"), device.clock)
    assert first.chosen("product 12×32") == "ours"
    assert first.chosen("product 7×7") == "stock"  # never checked
    assert seen == ["0/1 product 12×32", "1/1 "]
    ran = len(device.batches["ours"])

    again = Choices(path, "M2, macOS 15, mlx 1")
    again.tune(operations(device), clock=device.clock)
    assert again.decisions == first.decisions
    assert len(device.batches["ours"]) == ran, "nothing was measured again"

    upgraded = Choices(path, "M2, macOS 15, mlx 2")
    assert upgraded.decisions == {}
    upgraded.tune(operations(device, wrong=1.0), clock=device.clock)
    assert upgraded.chosen("product 12×32") == "stock"


@pytest.mark.parametrize("content", ["", "[]", '{"identity": "x", "decisions": {"a": {"chosen": 1, "what": 2}}}'])
def test_a_broken_file_is_decided_anew(content: str, tmp_path: Path) -> None:
    path = tmp_path / "metal.json"
    path.write_text(content)
    assert Choices(path, "x").decisions == {}


def test_a_file_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    choices, device = Choices(tmp_path / "file" / "metal.json", "x"), Device()
    choices.tune(operations(device), clock=device.clock)
    assert choices.chosen("product 12×32") == "ours"


def test_a_decision_survives_the_file(tmp_path: Path) -> None:
    choices = Choices(tmp_path / "metal.json", "x")
    choices.decisions["a"] = Decision("ours", True, {"padded": "differs"}, {"ours": [1.0, 2.0, 3.0]})
    choices.save()
    assert Choices(tmp_path / "metal.json", "x").decisions == choices.decisions
    assert json.loads((tmp_path / "metal.json").read_text())["identity"] == "x"
