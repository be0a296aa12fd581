"""Gemma 4 with the kernels for CUDA, emulated: which run, and that they compute the same."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from backends import running

from gemma4 import write_assistant, write_shape
from headstart.checkpoint import load_model
from headstart.kernels.cuda import backend as cuda
from headstart.models import Model

OURS = ("launch_attention", "launch_arrange_into", "launch_route")


def near(found: mx.array, expected: mx.array) -> bool:
    seen = mx.isfinite(expected)
    found, expected = (mx.where(seen, each.astype(mx.float32), 0) for each in (found, expected))
    return bool(mx.linalg.norm(found - expected) < 3e-2 * mx.linalg.norm(expected))


def counting(kernel: Any, name: str, ran: Counter[str]) -> Any:
    def run(*given: Any, **more: Any) -> Any:
        ran[name] += 1
        return kernel(*given, **more)

    return run


def draft(model: Model) -> tuple[mx.array, mx.array]:
    """The logits of the first draft after eleven tokens, and the hidden state for the next."""
    state, text = model.make_state(1), mx.array([[5, 9, 3, 7, 11, 2, 8, 4, 6, 1, 12]])
    hidden = model.trunk(text, state, certain=11)
    state.commit(mx.array([11]), most=11)
    return model.assistant_drafts(state)(model.backend, model.embed, hidden[:, -1:], mx.array([13]))


@pytest.mark.slow  # to compile
@pytest.mark.parametrize(
    ("shape", "counted"),
    [
        ("gemma4_e2b", {"launch_attention": 6, "launch_arrange_into": 3}),
        ("gemma4_a4b", {"launch_attention": 6, "launch_arrange_into": 4, "launch_route": 6}),
    ],
)
def test_kernels_run_where_they_fit(
    shape: str, counted: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention but for heads of 512, the rotation of sliding layers, the choice of experts; MLX's operations do the
    rest: norms of values, experts' sums, embeddings of layers."""
    target = write_shape(tmp_path / "model", shape, vocab_size=64, vocab_size_per_layer_input=64)
    expected = load_model(target, drafter=write_assistant(tmp_path / "assistant", target), dtype=mx.float32)
    model, ran = load_model(target, drafter=tmp_path / "assistant", dtype=mx.float16), Counter[str]()
    for name in OURS:
        monkeypatch.setattr(cuda, name, counting(getattr(cuda, name), name, ran))
    with running("cuda") as backend:
        model = replace(model, backend=backend)
        state, window = model.make_state(1), mx.array([[5, 9, 3]])
        made = model.logits(model.trunk(window, state, certain=1))
        assert near(made, expected.logits(expected.trunk(window, expected.make_state(1), certain=1)))
        assert ran == counted
        ran.clear()
        for ours, theirs in zip(draft(model), draft(expected), strict=True):
            assert near(ours, theirs)
        assert ran["launch_attention"] == counted["launch_attention"] + 4
