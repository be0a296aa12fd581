"""Kernels beside stock ops: what agrees, what does not, and what the tuning on Metal found."""

from dataclasses import replace

import mlx.core as mx
import pytest

from fixtures import EVERY_FAMILY, FAMILIES, builtin_model, family_model
from headstart.bench import kernel_times as module
from headstart.bench.kernel_times import Comparison, kernel_table, kernel_times, of_check, time_kernel
from headstart.kernels.checks import Candidate, KernelCheck

ROWS = mx.random.normal((1, 16, 8), key=mx.random.key(1))


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPEATS", 1)


LATENT = (
    "deepseek_v3", "glm4_moe_lite", "longcat_flash", "bailing_hybrid", "deepseek_v32", "glm_moe_dsa", "glm5_next",
)  # fmt: skip


DELTA = dict.fromkeys(("bailing_hybrid", "glm5_next"), "delta attention")
RECURRENT = {"nemotron_h": "Mamba-2"} | DELTA | dict.fromkeys((*FAMILIES, "built in"), "gated delta net")


@pytest.mark.parametrize("family", [*EVERY_FAMILY, "built in"])
def test_the_kernels_of_every_family_agree_with_mlx(family: str) -> None:
    model = builtin_model("tiny-qwen3.5-moe") if family == "built in" else family_model(family)
    mx.eval(model.trunk(mx.array([[1, 2, 3]]), model.make_state(1), 3))  # modules keep what they were used with
    times = kernel_times(model)
    kinds = {"latent attention" if family in LATENT else "attention", "feed-forward", "product"}
    kinds |= {RECURRENT[family]} if family in RECURRENT else set()
    assert {each.operation for each in times} == kinds
    for each in times:
        assert each.others == ""
        assert each.exact
        assert each.distance is not None
        assert each.distance < (1e-4 if model.dtype == mx.float32 else 0.02)
        assert list(each.seconds) == list(each.stock_seconds) == [1, 2, 4]
    assert len(kernel_table(times).splitlines()) == 2 + len(times)


def compared(ours: object, stock: object = lambda x: 2 * x) -> module.KernelTime:
    return time_kernel(Comparison("product", "8×8", 8, ours, stock), ROWS)  # type: ignore[arg-type]


def test_wrong_dependent_and_failing_kernels_are_shown() -> None:
    right = compared(lambda x: x + x)
    assert (right.exact, right.stock_exact, right.distance) == (True, True, 0.0)
    assert compared(lambda x: 3 * x).distance == pytest.approx(0.5)
    dependent = compared(lambda x: 2 * x + x.shape[1] * 1e-3)
    assert (dependent.exact, dependent.stock_exact) == (False, True)
    failed = compared(lambda x: x @ x)
    assert (failed.used, failed.exact) == ("failed", False)
    assert "ValueError" in failed.others
    page = kernel_table([right, failed])
    assert "µs at 1/2/4 rows" in page
    assert "| failed | no " in page
    assert (right.failed, failed.failed) == (False, True)


def test_what_the_tuning_on_metal_found_is_shown_as_it_is() -> None:
    def candidate(
        name: str, refused: str | None, exact: bool | None, error: float | None, *seconds: float
    ) -> Candidate:
        return Candidate(name, refused, exact, error, dict(zip((1, 2, 4, 16), seconds, strict=False)))

    stock = candidate("stock", None, None, 0.0, 1e-4, 2e-4, 3e-4, 4e-4)
    split = candidate("metal", None, True, 2e-4, 9e-5, 1e-4, 1.1e-4, 3e-4)
    padded = candidate("metal-padded", None, False, 2e-4, 8e-5, 1.2e-4, 2e-4, 5e-4)
    unfit = candidate("metal-columns", "does not fit", None, None)
    check = KernelCheck("product", "4096×2560, 4 bits", "metal", True, (stock, split, padded, unfit))
    assert not of_check(check).failed
    broken = replace(check, candidates=(*check.candidates[:-1], replace(unfit, refused="failed: error: a |\n| b")))
    assert of_check(broken).failed
    assert r"failed: error: a \| \| b" in kernel_table([of_check(broken)])
    (line,) = kernel_table([of_check(check)]).splitlines()[2:]
    assert [cell.strip() for cell in line.strip("|").split("|")] == [
        "product", "4096×2560, 4 bits", "metal", "yes", "90 / 100 / 110 / 300", "not compared",
        "100 / 200 / 300 / 400",
        "2e-04", "metal-padded: 80 / 120 / 200 / 500 µs, rows do not agree; metal-columns: does not fit",
    ]  # fmt: skip
