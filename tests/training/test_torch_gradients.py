"""`train-head` follows the gradients that PyTorch finds, on the built-in model's own head."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

torch = pytest.importorskip("torch", reason="training needs PyTorch: pip install -e '.[training]'")

import headstart  # noqa: E402
from fixtures import builtin_model, random_prompt  # noqa: E402
from headstart.checkpoint.config import read_config  # noqa: E402
from headstart.training.head import opened_head, trained_parameters  # noqa: E402
from headstart.training.loss import WEIGHTS, loss_and_gradients  # noqa: E402
from training import export  # noqa: E402
from training.shapes import SHAPES  # noqa: E402

NAME, LENGTH = "tiny-qwen3.5", 24
FOLDER = Path(headstart.__file__).parent / "builtin" / NAME


def by_torch(ids: list[int]) -> dict[str, np.ndarray[Any, Any]]:
    net, steps = export.load(FOLDER, SHAPES[NAME]), len(WEIGHTS)
    length = len(ids) - steps
    embedded = net.embed(torch.tensor([ids])).detach()
    with torch.no_grad():
        hidden = net.model(embedded, [])
        wanted = net.logits(hidden).softmax(-1)
    loss = torch.tensor(0.0)
    made = net.mtp.unroll(embedded, hidden[:, :length], torch.arange(length), steps, [])
    for step, (weight, x) in enumerate(zip(WEIGHTS, made, strict=True), 1):
        likely = net.logits(x).log_softmax(-1)
        loss = loss - weight * (wanted[:, step : step + length] * likely).sum(-1).mean()
    loss.backward()
    return {name: each.grad.numpy() for name, each in net.mtp.named_parameters() if each.grad is not None}


def test_gradients_are_those_of_pytorch() -> None:
    model = builtin_model(NAME, mx.float32)
    ids = random_prompt(model, LENGTH)
    head = opened_head(model, read_config(FOLDER))
    counts = mx.ones((1, LENGTH - len(WEIGHTS)))
    given = trained_parameters(head.weights.mtp), mx.array([ids]), counts
    _, gradients = loss_and_gradients(head, model, *given)
    ours, theirs = dict(tree_flatten(gradients)), by_torch(ids)
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert np.abs(np.array(ours[name]) - expected).max() < 2e-3 * np.abs(expected).max(), name
