"""Our forwards over mlx-lm's modules against the modules' own, and compiled passes against described ones."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from fixtures import batch_of, random_model, random_prompt, remembering
from headstart.engine.step import step
from headstart.kernels import Backend, graph
from headstart.limits import MAX_K
from headstart.models import Model


@pytest.mark.usefixtures("stock_ops")
@pytest.mark.parametrize("family", ["dense", "moe", "next"])
def test_a_feed_forward_has_the_bits_of_the_module(family: str) -> None:
    module = random_model(family).weights.layers[0].mlp
    for width in (1, 20):  # mlx-lm sorts the choices of experts in the second
        x = mx.random.normal((2, width, module.gate_proj.weight.shape[-1] if family == "dense" else _inputs(module)))
        assert mx.array_equal(Backend().mlp_or_mixture(module, x), module(x))


def _inputs(module: nn.Module) -> int:
    return int(module.gate.weight.shape[-1])


@pytest.mark.slow
def test_a_remembered_pass_has_the_bits_of_one_that_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    described, model = rounds(random_model("dense"), k=2), remembering(random_model("dense"))
    monkeypatch.setattr(graph, "OFTEN", 1)
    assert rounds(model, k=2) == described
    passes, chain = model.backend._heads[model.draft_head]
    assert model._score.kinds  # some were remembered
    assert chain.kinds
    monkeypatch.setattr(graph.Remembering, "packed_sampler", lambda *given: None)  # as with penalties
    assert rounds(model, k=2) == described
    assert passes.graph.kinds


def test_the_widest_windows_are_remembered_and_a_prompt_is_not() -> None:
    model = remembering(random_model("dense"))
    for width, remembers in ((MAX_K + 1, True), (MAX_K + 2, False)):
        model._score.kinds.clear()
        for _ in range(2):
            model.score(mx.zeros((1, width), mx.int32), model.make_state(1))
        assert bool(model._score.kinds) == remembers
    model.trunk(mx.zeros((1, 2), mx.int32), model.make_state(1), certain=2)
    assert {shape[3][1] for shape in model._score.seen} == {MAX_K + 1}


def rounds(model: Model, k: int) -> list[tuple[list[list[int]], float]]:
    batch = batch_of(model, random_prompt(model, 6, 0), random_prompt(model, 11, 1), k=k)
    said = []
    for _ in range(4):
        round = step(model, batch, k)
        mx.eval(round.verdict.tokens, *batch.arrays())
        said.append((round.verdict.tokens.tolist(), round.logits.sum().item()))
    return said


@pytest.mark.parametrize("family", ["dense", "moe"])
def test_a_head_that_is_asked_for_one_pair_of_each_row_has_the_bits_of_all(family: str) -> None:
    model = random_model(family)
    hidden, tokens = mx.random.normal((3, 5, 64), key=mx.random.key(1)), mx.arange(15).reshape(3, 5)
    every, one = model.make_head_state(3), model.make_head_state(3)
    for rows in (every, one):  # each row has another length before it
        model.head(hidden, tokens, rows)
        rows.commit(mx.array([5, 0, 2]), most=5)
    last = mx.array([4, 0, 2])
    expected = model.head(hidden, tokens, every)
    found = model.head(hidden, tokens, one, last=last)
    assert found.shape == (3, 1, 64)
    for row, at in enumerate(last.tolist()):
        assert mx.array_equal(found[row, 0], expected[row, at])
    for mine, all_of_it in zip(one.layers, every.layers, strict=True):
        assert mx.array_equal(mine.keys, all_of_it.keys)
        assert mx.array_equal(mine.values, all_of_it.values)


def test_shapes_are_forgotten_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = random_model("dense")
    model = remembering(plain)
    monkeypatch.setattr(graph, "MOST", 2)
    assert [rounds(model, k) for k in (0, 1, 2, 3)] == [rounds(plain, k) for k in (0, 1, 2, 3)]
    assert 0 < len(model._score.seen) <= 2
