"""Every family runs on a backend whose name nothing knows: a device is added in one place."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from fixtures import EVERY_FAMILY, Answer, collect, random_prompt, submit, write_any
from headstart.checkpoint import load_model
from headstart.engine import Engine
from headstart.engine.invariance import is_batch_invariant, max_invariant_rows
from headstart.kernels import Backend
from headstart.models import Model
from headstart.state import PrefixCache

# Which mlx-lm's modules multiply themselves, or are float32 whatever the activations are.
ROUTERS = ("mlp.gate.gate", "router.classifier", "indexer.weights_proj")
KINDS: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 3}, {"presence_penalty": 1.0}]


class Counting(Backend):
    """MLX's operations, of which it counts the products."""

    def __init__(self) -> None:
        super().__init__("abacus")
        self.calls = 0
        self.multiplied: set[int] = set()

    def multiply(self, x: mx.array, layers: Any) -> list[mx.array]:
        self.calls += 1
        self.multiplied.update(id(layer) for layer in layers)
        return super().multiply(x, layers)


def answers(model: Model) -> list[Answer]:
    """Of three requests in a batch, twice, so that prefixes are found again."""
    engine, k = Engine(model, prefix=PrefixCache(1 << 26, chunk=8)), 3 if model.has_head else 0
    made = []
    for _ in range(2):
        given = [(random_prompt(model, 9 + 4 * n, n), {**kind, "k": k}) for n, kind in enumerate(KINDS)]
        made += [collect(each) for each in [submit(engine, prompt, max_tokens=6, **kind) for prompt, kind in given]]
    return made


# Families whose layers are of the same operations as another's.
LIKE_OTHERS = (
    "mistral", "sliding", "qwen2", "qwen3", "ministral3", "mistral3", "glm4_moe_lite", "gemma4_a4b", "step3p7",
)  # fmt: skip


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[pytest.mark.slow] * (each in LIKE_OTHERS)) for each in EVERY_FAMILY]
)
def test_a_new_backend_computes_its_operation_for_every_family_and_changes_nothing_else(
    family: str, tmp_path: Path
) -> None:
    write_any(tmp_path, family)
    counting = Counting()
    model, plain = (load_model(tmp_path, dtype=mx.float32, backend=each) for each in (counting, Backend()))
    assert model.backend is counting
    assert counting.calls == 0, "nothing is computed by loading"
    assert is_batch_invariant(model) == is_batch_invariant(plain)
    assert max_invariant_rows(model) == max_invariant_rows(plain)
    for ours, theirs in zip(answers(model), answers(plain), strict=True):
        assert ours.error is None
        assert ours.tokens == theirs.tokens
        assert (ours.origins, ours.bursts, ours.finish_reason) == (
            theirs.origins,
            theirs.bursts,
            theirs.finish_reason,
        )
        assert ours.stats is not None
        assert theirs.stats is not None
        for name in ("accepted_draft_tokens", "proposed_draft_tokens", "exact"):
            assert getattr(ours.stats, name) == getattr(theirs.stats, name)
    linear = {path: id(each) for path, each in model.weights.named_modules() if isinstance(each, nn.Linear)}
    missed = [path for path, which in linear.items() if which not in counting.multiplied]
    assert all(path.endswith(ROUTERS) for path in missed)
    before, state = counting.calls, model.make_state(1)
    model.score(mx.array([[1, 2, 3]]), state)
    once = counting.calls - before
    state.commit(mx.array([1], mx.int32), most=1)
    model.score(mx.array([[4]]), state)
    assert counting.calls - before == 2 * once, "as many products for a window as for a token"
