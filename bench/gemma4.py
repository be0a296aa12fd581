"""Time steps of Gemma 4's shapes on a CPU, at about 100 million parameters, with random weights.

python bench/gemma4.py [SHAPE ...]        unified, a4b, e2b

A step is one sequence after 300 tokens, in CPU seconds, ours and MLX's operations in turn. A row: a step without
drafts by MLX's operations, ours relative to it, a window of four tokens relative to ours, and one draft of the
assistant likewise.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from gemma4 import CONFIGS, write_assistant, write_shape
from headstart.checkpoint import load_model
from headstart.models import Model

SIZES: dict[str, dict[str, Any]] = {
    "gemma4_unified": {"hidden_size": 768, "intermediate_size": 3584, "num_hidden_layers": 9},
    "gemma4_a4b": {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 9, "num_experts": 20,
                   "top_k_experts": 4, "moe_intermediate_size": 256},
    "gemma4_e2b": {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 9,
                   "hidden_size_per_layer_input": 64, "num_kv_shared_layers": 3},
}  # fmt: skip
COMMON = {
    "vocab_size": 16384,
    "vocab_size_per_layer_input": 16384,
    "head_dim": 128,
    "global_head_dim": 256,
    "sliding_window": 256,
    "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 3,
}
CLUSTERS = {"num_centroids": 256, "centroid_intermediate_top_k": 32}  # where the shape has them
CONTEXT, ROUNDS = 300, 30


def prefilled(model: Model) -> Any:
    tokens = mx.arange(CONTEXT)[None] * 37 % model.vocabulary
    state = model.make_state(1)
    model.trunk(tokens, state, certain=CONTEXT)
    state.commit(mx.array([CONTEXT]), most=CONTEXT)
    mx.eval(state.arrays())
    return state


def passes(model: Model, state: Any) -> dict[str, Callable[[], list[mx.array]]]:
    """What is timed: each leaves what is committed as it is."""
    hidden = mx.zeros((1, 1, model.hidden_size), model.dtype)

    def window(width: int) -> list[mx.array]:
        tokens = mx.arange(width)[None] + 5
        return [model.logits(model.trunk(tokens, state, certain=1)), *state.arrays()]

    def draft() -> list[mx.array]:
        return [*model.assistant_drafts(state)(model.backend, model.embed, hidden, mx.array([7]))]

    return {"step": lambda: window(1), "window of 4": lambda: window(4), "draft": draft}


def cpu_seconds(run: Callable[[], list[mx.array]]) -> float:
    began = time.process_time()
    mx.eval(run())
    return time.process_time() - began


def measure(shape: str, place: Path) -> str:
    target = write_shape(place / "model", shape, **COMMON, **SIZES[shape])
    assistant = write_assistant(place / "assistant", target, hidden_size=256, **CLUSTERS)
    ours = load_model(target, drafter=assistant, dtype=mx.float32)
    stock = replace(ours, backend=ours.backend.stock())
    runs = passes(ours, prefilled(ours))
    runs["stock"] = passes(stock, prefilled(stock))["step"]
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name].append(cpu_seconds(run))
    middle = {name: sorted(each)[ROUNDS // 2] for name, each in times.items()}
    count = sum(array.size for _, array in tree_flatten(ours.weights.parameters()))
    own = middle["step"]
    return (
        f"| {shape} | {count / 1e6:.0f}M | {1e3 * middle['stock']:.1f} ms | {own / middle['stock']:.2f} | "
        f"{middle['window of 4'] / own:.2f} | {middle['draft'] / own:.3f} |"
    )


def main(shapes: list[str]) -> None:
    titles = ("shape", "parameters", "stock step", "ours", "window of 4", "a draft")
    print(f"| {' | '.join(titles)} |\n| --- |{' ---: |' * 5}")
    for shape in [f"gemma4_{each}" for each in shapes] or list(CONFIGS):
        with TemporaryDirectory() as place:
            print(measure(shape, Path(place)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
