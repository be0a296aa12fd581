"""Choosing kernels on a Mac, with simulated chips: one per generation, and chips on which something is wrong."""

import json
import logging
import os
import re
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.gated_delta import gated_delta_ops

from fixtures import random_model
from headstart.kernels import Backend, cache
from headstart.kernels.experts import stock_route
from headstart.kernels.layers import Pass
from headstart.kernels.metal import backend, choice, device, kept, stock, tune
from headstart.kernels.metal.backend import MetalBackend
from headstart.kernels.metal.choice import TIMED, KernelCheck, checks, choose
from headstart.kernels.metal.tune import operations
from headstart.kernels.norms import stock_norm
from headstart.kernels.types import Ran, Window
from headstart.state import Recurrent

pytestmark = pytest.mark.usefixtures("stock_ops")
METAL = MetalBackend()
MATRIX = 10.0  # times as slow as the other kernel of ours
LACKS = {"metal-tensor": "needs matrix units"}


class Chip:
    """A simulated GPU: which kernel MLX takes for so many rows, how long each takes, and what ours do."""

    def __init__(self, generation: int, ultra: bool = False):
        self.generation, self.ultra = generation, ultra
        self.now = 0.0
        self.launched: list[tuple[str, int]] = []
        self.ours: Callable[[int], float] = lambda rows: 1.1 + 0.1 * rows
        self.best = "metal"  # of ours
        self.threads = 1024  # that a pipeline takes
        self.fails: str | None = None
        self.wrong = 0.0
        self.refuses = 0  # products of so many outputs
        self.wrong_fused = 0.0  # where several products are one launch
        self.changes_at = 99  # rows from which on ours rounds in another way

    def clock(self) -> float:
        return self.now

    def stock_kernel(self, rows: int, small: bool) -> str:
        """As mlx/backend/metal/quantized.cpp dispatches."""
        if self.generation <= 2:
            limit = (32 if small else 12) if self.ultra else (14 if small else 6)
            return "qmv" if rows < limit else "qmm"
        limit = 33 if small and self.generation == 5 and not self.ultra else 13
        return "qmv" if rows == 1 else "qmv_wide" if rows < limit else "qmm"

    def stock(self, rows: int, small: bool) -> float:
        kernel = self.stock_kernel(rows, small)
        self.now += {"qmv": float(rows), "qmv_wide": -(-rows // 5) + 0.05 * rows, "qmm": 4.0}[kernel]
        self.launched.append((kernel, rows))
        return {"qmv": 0.0, "qmv_wide": 1e-6, "qmm": 2e-6}[kernel]

    def launch_ours(self, x: mx.array, weights: list, kernel: str) -> list[mx.array]:  # type: ignore[type-arg]
        if kernel == "metal-matrix" and self.threads < 256:
            raise ValueError(f"Thread group size (256) is greater than  the {choice.TOO_MANY} ({self.threads}).")
        if self.fails is not None or weights[0].outputs == self.refuses:
            raise RuntimeError(self.fails)
        rows = prod(x.shape[:-1])
        self.now += self.ours(rows) * (1 if kernel == self.best else MATRIX)
        self.launched.append((kernel, rows))
        rounding = 4e-6 if rows >= self.changes_at else 3e-6
        made = [row_by_row(x, each.weight) * (1 + rounding) + self.wrong for each in weights]
        return made[:2] + [each + self.wrong_fused for each in made[2:]]


def row_by_row(x: mx.array, weight: mx.array) -> mx.array:
    return (x[..., None, :] * weight).sum(axis=-1)


class SimulatedLinear(nn.Linear):
    """A layer whose product is the chip's."""

    def __init__(self, chip: Chip, outputs: int, small: bool):
        super().__init__(32, outputs, bias=False)
        self.chip, self.small = chip, small

    def __call__(self, x: mx.array) -> mx.array:
        return row_by_row(x, self.weight) * (1 + self.chip.stock(prod(x.shape[:-1]), self.small))


class OneLayer(nn.Module):
    def __init__(self, chip: Chip, outputs: int = 12, small: bool = False):
        super().__init__()
        self.lm_head = SimulatedLinear(chip, outputs, small)


@pytest.fixture(autouse=True)
def on_a_mac(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (cache, choice):
        monkeypatch.setattr(module, "cache_folder", lambda: tmp_path / "headstart" / "kernels")
    monkeypatch.setattr(choice, "_decided", {})
    monkeypatch.setattr(choice, "identity", lambda: "Apple M2, macOS 15.0, mlx 1, kernels a")
    monkeypatch.setattr(tune, "metal_refusal", lambda dtype, layer, weights, kernel="metal": LACKS.get(kernel))
    monkeypatch.setattr(stock, "gated_delta_kernel", gated_delta_ops)


def chosen_on(chip: Chip, monkeypatch: pytest.MonkeyPatch, small: bool = False) -> tuple[nn.Module, KernelCheck]:
    for module in (tune, backend):
        monkeypatch.setattr(module, "metal_products", chip.launch_ours)
    model = OneLayer(chip, small=small)
    choose(operations(model, mx.float32), clock=chip.clock)
    return model, checks()[-1]


def slower(rows: int) -> float:
    return 50.0


@pytest.mark.parametrize(
    ("chip", "ours", "small", "expected"),
    [
        pytest.param((1, False), None, False, "metal", id="M1: stock reads weights again for every row"),
        pytest.param((1, False), slower, False, "stock-split", id="M1, ours slower: never so many rows as to change"),
        pytest.param((2, False), slower, True, "stock-split", id="M2, small shape"),
        pytest.param((1, True), slower, True, "stock", id="M1 Ultra, small shape: one kernel for 1 to 16 rows"),
        pytest.param((2, True), None, False, "metal", id="M2 Ultra"),
        pytest.param((3, False), slower, False, "stock-padded", id="M3: another kernel from two rows on"),
        pytest.param((4, False), slower, False, "stock-padded", id="M4"),
        pytest.param((4, True), lambda rows: 0.9, False, "metal", id="M4 Max, ours faster"),
        pytest.param((5, False), slower, True, "stock-padded", id="M5, small shape"),
        pytest.param((5, True), slower, False, "stock-padded", id="M5 Max"),
    ],
)
def test_each_generation_gets_the_fastest_exact_kernel_for_all_widths(
    chip: tuple[int, bool],
    ours: Callable[[int], float] | None,
    small: bool,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Chip(*chip)
    device.ours = ours or device.ours
    model, check = chosen_on(device, monkeypatch, small)
    assert (check.chosen, check.exact) == (expected, True)
    assert [each.refused for each in check.candidates] == [None] * 6 + [LACKS["metal-tensor"]]
    assert all(set(each.seconds) == set(TIMED) for each in check.candidates[:-1])

    # What was chosen computes every width, and a row in the bits that it has alone.
    x = mx.random.normal((16, 32), key=mx.random.key(5))
    alone = [METAL.product(x[i : i + 1], model.lm_head) for i in range(16)]
    for rows in range(1, 17):
        device.launched.clear()
        together = METAL.product(x[:rows], model.lm_head)
        assert mx.array_equal(together, mx.concatenate(alone[:rows])), rows
        assert ("metal" in dict(device.launched)) == (expected == "metal")
    device.launched.clear()
    METAL.product(mx.zeros((17, 32)), model.lm_head)  # a prompt's
    assert [rows for _, rows in device.launched] == [17]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (
            {"fails": "Unable to build\nwarning: x\nsource:3:1: error: no  such\n  name"},
            "failed: source:3:1: error: no such name",
        ),
        ({"fails": ""}, "failed: RuntimeError"),
        ({"wrong": 0.5}, "differs from stock ops"),
        ({"wrong": float("nan")}, "differs from stock ops"),
        ({"wrong_fused": 1e-6}, "differs from stock ops"),
        ({"changes_at": 9}, None),
        ({"changes_at": 33}, None),
    ],
)
def test_a_kernel_that_fails_is_wrong_or_not_independent_is_never_used(
    fault: dict[str, object], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    chip = Chip(2)
    chip.ours = lambda rows: 0.01
    for name, value in fault.items():
        setattr(chip, name, value)
    _, check = chosen_on(chip, monkeypatch)
    assert (check.chosen, check.exact) == ("stock-split", True)
    for ours in check.candidates[4:6]:
        assert not ours.exact
        if reason is None:
            assert ours.refused is None
        else:
            assert (ours.refused or "").startswith(reason)
            assert not ours.seconds
    assert choice.kernels_in_use() == "native (metal, 1 of 1 operations)"


def test_a_kernel_for_matrices_computes_up_to_64_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    chip = Chip(2)
    chip.best = "metal-matrix"
    model, check = chosen_on(chip, monkeypatch)
    assert (check.chosen, check.exact) == ("metal-matrix", True)
    METAL.prepare(model, mx.float32)
    assert METAL.most_rows == choice.WIDE_ROWS
    assert max(width * sequences for width, sequences in METAL.windows) == choice.WIDE_ROWS
    x = mx.random.normal((64, 32), key=mx.random.key(5))
    chip.launched.clear()
    assert mx.array_equal(METAL.product(x, model.lm_head)[40:], METAL.product(x[40:], model.lm_head))
    METAL.product(mx.zeros((65, 32)), model.lm_head)
    assert chip.launched == [("metal-matrix", 64), ("metal-matrix", 24), ("qmm", 65)]
    chip.best = "metal"
    choose(operations(OneLayer(chip, outputs=20), mx.float32), clock=chip.clock)
    METAL.prepare(model, mx.float32)
    assert METAL.most_rows == choice.MOST_ROWS, "another product takes no more"


def test_a_pipeline_that_takes_fewer_threads_is_launched_with_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    chip = Chip(2)
    chip.best, chip.threads = "metal-matrix-4", 192
    _, check = chosen_on(chip, monkeypatch)
    assert (check.chosen, check.exact) == ("metal-matrix-4", True)
    wide = next(each for each in check.candidates if each.name == "metal-matrix")
    assert (wide.refused or "").endswith("(192).")
    chip.threads = 256
    choose(operations(OneLayer(chip, outputs=20), mx.float32), clock=chip.clock)
    assert "metal-matrix-4" not in {each.name for each in checks()[-1].candidates}, "it is compiled for nothing"


def test_where_nothing_is_exact_stock_ops_compute_and_the_summary_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    chip = Chip(3)
    chip.fails = "no such function"
    chip.stock_kernel = lambda rows, small: "qmv" if rows % 2 else "qmm"  # type: ignore[method-assign]
    model, check = chosen_on(chip, monkeypatch)
    assert (check.chosen, check.exact) == ("stock", False)
    assert choice.kernels_in_use() == (
        "stock (metal, 0 of 1 operations; not exact: product 12×32, float32, float32; "
        "metal-matrix: failed: no such function; metal-tensor: needs matrix units; metal: failed: no such function)"
    )
    assert not METAL.is_exact((), model, mx.float32)


def test_exactness_comes_before_speed_unless_the_model_cannot_be_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    def inexact(rows: int, small: bool) -> str:
        return "qmv" if rows % 2 else "qmm"

    chip = Chip(3)
    chip.ours, chip.refuses = slower, 20
    monkeypatch.setattr(chip, "stock_kernel", inexact)
    model, check = chosen_on(chip, monkeypatch)
    assert (check.chosen, check.exact) == ("metal", True), "exact, though slower"
    wider = OneLayer(chip, outputs=20)
    wider.layers = [OneLayer(chip), OneLayer(chip, outputs=16)]
    choose(operations(wider, mx.float32), clock=chip.clock)
    found = {each.shape.partition("×")[0]: each.chosen for each in checks()}
    assert found == {"12": "metal", "20": "stock", "16": "stock"}
    assert METAL.is_exact((), model, mx.float32), "a model that was loaded before stays exact"
    assert not METAL.is_exact((), wider, mx.float32)
    choice._decided.clear()
    choose(operations(wider.layers[1], mx.float32))
    assert checks()[0].chosen == "metal", "what is kept is the exact choice"


def test_a_check_that_fails_does_not_end_loading_and_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chip, fails = Chip(2), [True]
    good, bad = (operations(OneLayer(chip, outputs), mx.float32)[0] for outputs in (12, 20))

    def flaky() -> dict[str, choice.Runs | str]:
        if fails[0]:
            raise MemoryError("no memory left")
        return {"stock": (lambda b, w: mx.zeros((16, 1, 20))[b, w],)}

    bad = replace(bad, candidates=flaky)
    monkeypatch.setattr(tune, "metal_products", chip.launch_ours)
    choose([good, bad], clock=chip.clock)
    assert [each.refused for each in checks()[1].candidates] == ["failed: no memory left"]
    assert checks()[1].shape not in (choice.cache_folder() / "metal.json").read_text()
    choice._decided.clear()
    chip.launched.clear()
    fails[0] = False
    choose([good, bad])
    assert not chip.launched, "what was decided before the failure is kept"
    assert [each.exact for each in checks()] == [True, True]

    def broken(*of_a_model: object) -> None:
        raise KeyError("weight")

    monkeypatch.setattr(backend, "model_operations", broken)
    with caplog.at_level(logging.WARNING, "headstart"):
        METAL.prepare(OneLayer(chip), mx.float32)
        assert not METAL.is_exact((), OneLayer(chip), mx.float32)
    assert caplog.text.count("could not be checked") == 2


def test_a_single_wrong_element_is_seen() -> None:
    x = mx.random.normal((16, 1, 4096), key=mx.random.key(1))
    wrong = mx.where(mx.arange(x.size).reshape(x.shape) == 5000, x + 0.01, x)
    operation = choice.Operation(
        "sum", "4096", lambda: {"stock": (lambda b, w: x[b, w],), "metal": (lambda b, w: wrong[b, w],)}
    )
    refused = choice.decide(operation).candidates[1].refused or ""
    assert re.fullmatch(r"differs from stock ops by \S+ in an element, more than 1e-03", refused)


def test_a_candidate_that_fails_when_it_is_timed_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    chip, begun = Chip(2), choice._turn

    def turn(operation: choice.Operation, run: choice.Run, rows: int, launches: int, clock: choice.Clock) -> float:
        taken = begun(operation, run, rows, launches, clock)
        if chip.launched[-1][0] == "metal":
            raise RuntimeError("timeout")
        return taken

    monkeypatch.setattr(choice, "_turn", turn)
    _, check = chosen_on(chip, monkeypatch)
    assert check.chosen == "stock-split"
    assert [each.refused for each in check.candidates] == [
        *[None] * 4,
        "failed: timeout",
        None,
        LACKS["metal-tensor"],
    ]


def test_a_kept_name_that_is_not_known_is_a_stock_product(monkeypatch: pytest.MonkeyPatch) -> None:
    model, check = chosen_on(Chip(2), monkeypatch)
    choice._decided[f"{check.operation} {check.shape}"] = replace(check, chosen="stock-triangles")
    assert METAL.product(mx.zeros((4, 32)), model.lm_head).shape == (4, 12)


def test_choices_are_kept_until_chip_system_library_or_sources_change(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    chip, said = Chip(2), []
    for module in (tune, backend):
        monkeypatch.setattr(module, "metal_products", chip.launch_ours)

    def again() -> str:
        choice._decided.clear()
        chip.launched.clear()
        said.clear()
        choose(operations(OneLayer(chip), mx.float32), lambda *progress: said.append(progress), chip.clock)
        return checks()[-1].chosen

    assert again() == "metal"
    assert said == [(0, 1, "product 12×32, float32, float32"), (1, 1, "")]
    found = checks()
    assert again() == "metal"
    assert checks() == [replace(each, kept=True) for each in found]
    assert not said
    assert not chip.launched, "nothing was measured again"

    chip.wrong = 1.0  # after an upgrade
    monkeypatch.setattr(choice, "identity", lambda: "Apple M2, macOS 15.0, mlx 2, kernels a")
    assert again() == "stock-split"
    stored = json.loads((tmp_path / "headstart" / "kernels" / "metal.json").read_text())
    assert list(stored) == ["Apple M2, macOS 15.0, mlx 2, kernels a"], "outdated choices are dropped"

    chip.wrong = 0.0
    choose(operations(OneLayer(chip, outputs=20), mx.float32), clock=chip.clock)
    choice._decided.clear()
    choose([*operations(OneLayer(chip), mx.float32), *operations(OneLayer(chip, outputs=20), mx.float32)])
    assert [each.chosen for each in checks()] == ["stock-split", "metal"], "shapes are kept beside each other"


def test_a_choice_depends_on_the_sources_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(mx, "device_info", lambda device: {"device_name": "Apple M4 Pro", "architecture": "g16s"})
    monkeypatch.setattr(choice.platform, "mac_ver", lambda: ("15.5", ("", "", ""), "arm64"))
    choice.identity.cache_clear()
    first = choice.identity()
    assert re.match(r"Apple M4 Pro, macOS 15.5, mlx [\d.]+, mlx-lm [\d.]+, kernels ", first)
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"changed")
    choice.identity.cache_clear()
    assert choice.identity() != first
    choice.identity.cache_clear()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: "[]",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"chosen"', '"what"'),
        lambda text: text.replace('"chosen": "metal"', '"chosen": "stock"'),  # and said to be exact
        lambda text: text.replace("12×32", "13×32").replace(r"12\u00d732", r"13\u00d732"),
        lambda text: text.replace('"exact": true', '"exact": 7', 1),
        lambda text: text.replace('"seconds": {', '"seconds": {"x": 1, ', 1),
    ],
)
def test_a_damaged_file_is_decided_anew(
    damage: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, check = chosen_on(Chip(2), monkeypatch)
    path = tmp_path / "headstart" / "kernels" / "metal.json"
    path.write_text(damage(path.read_text()))
    choice._decided.clear()
    chip = Chip(2)
    assert chosen_on(chip, monkeypatch)[1].chosen == check.chosen
    assert chip.launched
    assert kept.read_checks(path, choice.identity())


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "headstart").write_text("a file, not a folder")
    with caplog.at_level(logging.WARNING, "headstart"):
        assert chosen_on(Chip(2), monkeypatch)[1].chosen == "metal"
    assert "not kept" in caplog.text


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_costs_nothing_but_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert chosen_on(Chip(2), monkeypatch)[1].chosen == "metal"


def test_choices_that_others_may_have_written_are_not_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chosen_on(Chip(2), monkeypatch)
    folder = cache.cache_folder()
    assert folder.stat().st_mode & 0o077 == 0
    folder.chmod(0o777)
    choice._decided.clear()
    chip = Chip(2)
    with caplog.at_level(logging.WARNING, "headstart"):
        chosen_on(chip, monkeypatch)
    assert chip.launched, "decided anew"
    assert f"chmod 700 {folder}" in caplog.text


def test_stock_ops_can_be_forced_and_skip_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    chip = Chip(2)
    monkeypatch.setenv("HEADSTART_KERNELS", "stock")
    model = OneLayer(chip)
    METAL.prepare(model, mx.float32)
    assert not checks()
    assert not chip.launched
    assert choice.kernels_in_use() == "stock (HEADSTART_KERNELS=stock)"
    METAL.product(mx.zeros((4, 32)), model.lm_head)
    assert chip.launched == [("qmv", 4)]


@pytest.mark.parametrize("family", ["dense", "moe", pytest.param("next", marks=pytest.mark.slow)])
def test_every_operation_of_a_model_is_checked_when_it_is_loaded(
    family: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compiler(**arguments: object) -> None:
        raise RuntimeError("[metal::Device] Unable to build metal library from source")

    monkeypatch.setattr(mx.fast, "metal_kernel", compiler)
    device.metal_kernel.cache_clear()  # of what others have compiled
    monkeypatch.setattr(choice, "REPEATS", 1)
    monkeypatch.setattr(choice, "LAUNCHES", 1)
    model = random_model(family)
    METAL.prepare(model.weights, model.dtype)
    found = {each.operation for each in checks()}
    expected = {"product", "norm", "heads", "attention", "gated delta"}
    assert found == expected | ({"experts", "route", "combine"} if family != "dense" else set())
    for check in checks():
        assert check.chosen.startswith("stock")
        ours = [each for each in check.candidates if each.name.startswith("metal")]
        assert ours
        assert all("Unable to build" in (each.refused or "") for each in ours if each.name not in LACKS)
    assert METAL.is_exact((), model.weights, model.dtype) == all(each.exact for each in checks())


def test_routing_is_compared_by_expert_in_whatever_order_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def reversed_route(logits: mx.array, top: int, normed: bool) -> tuple[mx.array, mx.array]:
        indices, scores = stock_route(logits, top, normed)
        return indices[..., ::-1], (scores[..., ::-1] * 1.005).astype(scores.dtype)  # and a bit of bfloat16 off

    monkeypatch.setattr(tune, "metal_route", reversed_route)
    mixture = random_model("moe").weights.layers[0].mlp
    route = next(each for each in tune._mixture(mixture, mx.bfloat16) if each.operation == "route")
    stock, ours = choice.decide(route).candidates
    assert (stock.name, ours.name, ours.refused) == ("stock", "metal", None)
    assert ours.exact is not False
    assert 0 < (ours.error or 0) < 1e-2


def test_forms_of_a_kernel_that_a_plain_decode_uses_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def norm(x: mx.array, added: mx.array | None, weight: mx.array, eps: float) -> list[mx.array]:
        total = x + (0 if added is None else added)
        return [total, stock_norm(total, weight, eps)] if added is not None else [2 * stock_norm(total, weight, eps)]

    def delta(
        window: Window,
        weights: object,
        state: mx.array,
        conv: mx.array,
        pending: list[mx.array] | None,
        accepted: mx.array,
        certain: int,
    ) -> Ran:
        memory = Recurrent(state, conv, pending)
        ran = Backend().gated_delta_rule(net, window, memory, Pass(lambda window: accepted, accepted, certain))
        return ran if pending is not None or ran.drafts is not None else ran._replace(y=ran.y * mx.nan)

    monkeypatch.setattr(tune, "metal_norm", norm)
    monkeypatch.setattr(tune, "metal_gated_delta", delta)
    monkeypatch.setattr(tune, "gated_delta_refusal", lambda key, value: None)
    monkeypatch.setattr(choice, "_score", lambda candidate: candidate.name == "stock")  # ours is looked at first
    weights = random_model("dense").weights
    net = weights.layers[0].linear_attn
    for operation in (tune._norm(weights.norm, mx.bfloat16), tune._gated_delta(net, mx.bfloat16)):
        ours = choice.decide(operation).candidates[-1]
        assert (ours.refused or "").startswith("differs from stock ops"), operation.operation
