"""The CUDA kernels of greedy decoding, run on the CPU: what mlx's argmax and our acceptance in stock ops give."""

from collections.abc import Iterator

import cuda_on_cpu
import mlx.core as mx
import numpy as np
import pytest

from fixtures import batch_of, builtin_model, random_prompt
from headstart.engine import draft
from headstart.engine.step import step
from headstart.kernels import graph
from headstart.kernels.backend import Backend
from headstart.kernels.cuda import greedy
from headstart.kernels.cuda.persistent import Persistent
from headstart.kernels.cuda.report import CudaReport
from headstart.kernels.report import Report
from headstart.models import Model
from headstart.sampling import BatchContext, Choice, SamplingParams, SequenceParams, Verdict, controls

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu() -> Iterator[None]:
    with cuda_on_cpu.emulated() as patch:
        patch.setattr(greedy, "THREADS", 64)
        yield


def test_the_best_token_is_the_lowest_of_the_largest_and_nan_shows() -> None:
    size = 8 * 333  # the threads have five eights or six
    rows = np.round(4 * np.random.default_rng(0).normal(size=(12, size)))  # with many ties
    rows[1] = rows[2] = -INF
    rows[2, 77] = -3e38
    rows[3, 5] = NAN
    rows[4] = NAN
    rows[5, 900] = INF
    rows[6, [7, 2600, 100]] = 99
    rows[7] = 0
    rows[8, 0] = NAN
    logits = mx.array(rows).astype(mx.bfloat16).reshape(3, 4, size)
    found = greedy.launch_best(logits)
    kept = np.where(np.isnan(rows), -INF, rows)  # a NaN is never the best
    assert found.tokens.tolist() == np.argmax(kept, axis=-1).reshape(3, 4).tolist()
    plain = [row for row in range(12) if not np.isnan(rows[row]).any()]
    assert mx.array_equal(
        found.tokens.flatten()[mx.array(plain)], mx.argmax(logits, axis=-1).flatten()[mx.array(plain)]
    )
    assert mx.array_equal(found.finite, mx.isfinite(logits.max(axis=-1)))
    assert found.tokens.dtype == found.finite.dtype == mx.int32


@pytest.mark.parametrize("k", [0, 3])
def test_drafts_are_accepted_as_by_stock_ops(k: int) -> None:
    B, random = 40, np.random.default_rng(k)
    tokens, window = (mx.array(random.integers(0, 2, (B, k + 1)).astype(np.int32)) for _ in range(2))
    finite_each = mx.array((random.random((B, k + 1)) < 0.8).astype(np.int32))
    max_k, lengths, rounds = (mx.array(random.integers(0, 5, B).astype(np.int32)) for _ in range(3))
    remaining = mx.array(random.integers(-2, 6, B).astype(np.int32))
    most = mx.array(random.integers(0, 3, B).astype(np.int32))
    context = BatchContext(
        controls([SequenceParams(SamplingParams(), 0, 0, 9)], 9),
        lengths,
        rounds,
        mx.zeros((B, 0), mx.int32),
        remaining,
    )
    for choice in (Choice(tokens, finite_each), Choice(tokens, finite_each, most)):
        given = choice, window, max_k, context
        pairs = zip(Verdict._fields, greedy.launch_accept(*given), Backend().accept(*given), strict=True)
        for name, one, other in pairs:
            assert mx.array_equal(one, other), name


def test_columns_are_joined_and_a_single_row_is_everybodys() -> None:
    arrays = [mx.arange(6).reshape(3, 2), mx.array([[7], [8], [9]]), mx.array([[5]])]
    assert greedy.launch_columns(arrays)[0].tolist() == [[0, 1, 7, 5], [2, 3, 8, 5], [4, 5, 9, 5]]


@pytest.mark.parametrize("rows", [1, 6, 40])
def test_a_report_is_read_as_it_was_joined(rows: int) -> None:
    arrays = [mx.arange(rows * 2).reshape(rows, 2), mx.array([[-1]])]
    report = CudaReport(arrays, Persistent())
    assert report.read() == [[2 * row, 2 * row + 1, -1] for row in range(rows)]
    assert [array.nbytes for array in report.arrays] == {1: [8] * 8, 6: [8] * 32, 40: [640]}[rows]
    assert Report(arrays).read() == report.read()


def test_drafts_begin_after_the_pairs_before_them() -> None:
    for start in (Backend().draft_starts, greedy.launch_starts):
        last, starts = start(mx.array([9, 0, 70] * 15), mx.array([3, 0, 1] * 15), 3)
        assert last.tolist() == [2, 0, 0] * 15
        assert starts.tolist() == [[12, 0, 71] * 15, [13, 1, 72] * 15, [14, 2, 73] * 15]


def steps(model: Model, ks: list[int]) -> list[list[object]]:
    """What steps with these numbers of drafts generate and leave, of sequences that allow 0, 2 and 3."""
    batch = batch_of(model, *[random_prompt(model, 5 + 3 * row, row) for row in range(3)], k=3)
    batch.max_k, batch.remaining = mx.array([0, 2, 3]), mx.array([100, 100, 9])
    made: list[list[object]] = []
    for k in ks:
        done = step(model, batch, k)
        assert batch.head_state is not None
        kept = [batch.last, batch.remaining, batch.rounds, batch.trunk_state.lengths, batch.head_state.lengths]
        kept += [batch.history[:, :40], batch.unseen.counts]
        kept += [array[:, :, :40].astype(mx.float32) for array in batch.head_state.layers[0].arrays()]  # and drafts'
        made.append([each.tolist() for each in (*done.verdict[:4], done.copied, *kept)])
    assert step(model, batch, 2, source=draft.Source.NONE).verdict.proposed.tolist() == [0, 0, 0]
    return made


def test_a_step_generates_the_same_as_with_stock_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ks = builtin_model(dtype=mx.bfloat16), [3, 2, 0, 0, 3, 1]
    expected = steps(model, ks)
    monkeypatch.setattr(graph, "OFTEN", 10)  # kernels run while they are described
    monkeypatch.setattr(Backend, "propose", None)  # all drafts come from one graph
    assert steps(cuda_on_cpu.steps_on_cpu(model), ks) == expected
    assert sum(line[1][2] for line in expected) > 2  # drafts were accepted
