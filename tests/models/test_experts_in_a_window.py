"""Mixture of experts: which experts a token meets must not depend on who else is in the pass."""

import mlx.core as mx
import pytest

from fixtures import batch_of, random_model, random_prompt, recorded_experts
from headstart.engine.step import step
from headstart.models import Model

TOKENS = 24
SORTED_FROM = 64  # choices in a pass from which mlx-lm's SwitchGLU sorts them


def experts_by_token(model: Model, prompts: list[list[int]], k: int) -> list[list[list[list[int]]]]:
    """[sequence][generated token][layer] → the experts chosen for that token."""
    batch = batch_of(model, *prompts, k=k)
    met: list[list[list[list[int]]]] = [[] for _ in prompts]
    with recorded_experts(model) as layers:
        while min(len(row) for row in met) < TOKENS:
            for layer in layers:
                layer.asked.clear()
            round = step(model, batch, k)
            accepted = round.verdict.accepted.tolist()
            asked = [layer.asked[0].tolist() for layer in layers]  # of each layer, [B, k+1, top_k]
            for row, n in enumerate(accepted):
                met[row] += [[layer[row][w] for layer in asked] for w in range(n + 1)]
    return [row[:TOKENS] for row in met]


@pytest.mark.parametrize("family", ["moe", pytest.param("next", marks=pytest.mark.slow)])
def test_a_token_meets_the_same_experts_in_a_window_as_alone(family: str) -> None:
    model = random_model(family)
    prompts = [random_prompt(model, 6 + 5 * n, n) for n in range(5)]
    alone = [experts_by_token(model, [prompt], k=0)[0] for prompt in prompts]
    assert len({str(layer) for row in alone for layer in row}) > 20  # the router does choose
    for k in (0, 1, 3, 15):
        assert experts_by_token(model, prompts, k) == alone
    top_k = model.config["num_experts_per_tok"]
    assert 5 * 1 * top_k < SORTED_FROM <= 5 * 16 * top_k  # both of mlx-lm's paths were taken


@pytest.mark.parametrize("family", ["moe", "next"])
def test_a_token_meets_the_same_experts_in_a_prompt_as_alone(family: str) -> None:
    model = random_model(family)
    tokens = mx.array([random_prompt(model, 50)])
    with recorded_experts(model) as layers:
        mx.eval(model.trunk(tokens, model.make_state(1), certain=50))
        whole = [layer.asked.pop() for layer in layers]
        rows = model.make_state(1)
        for t in range(50):
            mx.eval(model.trunk(tokens[:, t : t + 1], rows, certain=1))
            rows.commit(mx.array([1]), most=1)
        single = [mx.concatenate(layer.asked, axis=1) for layer in layers]
    assert all(mx.array_equal(a, b) for a, b in zip(whole, single, strict=True))
