"""Time what the host needs to describe a step with the kernels of a device that is not here. `step.py` calls it.

Each kernel is an operation with its inputs and outputs that computes nothing (`tests/kernels/launch.cpp`), so MLX
describes as many as on the device, and none folds away. The layers are those of a released model; their sizes, on
which the time does not depend, are tiny. CPU time of the thread that describes, without what MLX computes. What
`mx.fast.metal_kernel` itself takes to put a kernel's text together is not in it.
"""

import statistics
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
from mlx_lm.models import gated_delta
from mlx_lm.models.cache import make_prompt_cache
from random_model import SHAPES, random_model

from headstart.engine.step import prefill_prompts, step
from headstart.kernels import Backend
from headstart.kernels.metal.backend import MetalBackend
from headstart.models import Model

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kernels"))
import launches
from backends import choose_all

PROMPT = [(7 * i) % 97 + 1 for i in range(64)]
TINY = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 128, "head_dim": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "max_position_embeddings": 4096,
}  # fmt: skip
TINY_EXPERTS = {"num_experts": 16, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
REMEMBERED = 4  # steps after which all shapes have been seen
# Operations of MLX that move nothing.
VIEWS = {
    "AsStrided", "Broadcast", "BroadcastAxes", "Copy", "Depends", "ExpandDims", "Flatten", "Reshape", "Slice",
    "Split", "Squeeze", "StopGradient", "Transpose", "Unflatten", "View",
}  # fmt: skip


def metal_model(name: str) -> Model:
    """Return a model of a released one's layers, and have a kernel of ours chosen for every operation."""
    sizes = TINY | (TINY_EXPERTS if "num_experts" in SHAPES[name] else {})
    model, _ = random_model(SHAPES[name] | sizes)
    choose_all(model)
    return replace(model, backend=MetalBackend())


class Steps:
    """Steps of which each is described and then computed."""

    launches: Counter[str]  # of the last that was not timed

    def describe(self) -> tuple[float, list[mx.array]]:
        """Return the seconds that it took, and all that the step gives."""
        raise NotImplementedError

    def run(self, *, counts: bool = False) -> float:
        seconds, arrays = self.describe()
        if counts:
            self.launches = launches.operations_of(arrays)
        mx.eval(arrays)
        return seconds


class Ours(Steps):
    """The engine's steps with k drafts."""

    def __init__(self, model: Model, k: int):
        self.model, self.k = model, k
        self.batch = prefill_prompts(replace(model, backend=Backend()), [PROMPT], k)

    def describe(self) -> tuple[float, list[mx.array]]:
        begun = time.thread_time()
        result = step(self.model, self.batch, self.k)
        seconds = time.thread_time() - begun
        verdict = result.verdict
        return seconds, [verdict.tokens, verdict.accepted, verdict.finite, *self.batch.arrays()]


def one_operation(*inputs: object, **_: object) -> mx.array:
    """Stand in for an operation of `mx.fast`, which on a CPU is several."""
    arrays = [each for each in inputs if isinstance(each, mx.array)]
    return launches.launch(arrays, [arrays[0].shape], [arrays[0].dtype])[0]


def one_delta(q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array, mask: object):  # type: ignore[no-untyped-def]
    """Stand in for mlx-lm's kernel of the gated delta rule."""
    return launches.launch([q, k, v, g, beta, state], [v.shape, state.shape], [v.dtype, state.dtype])


FAST = dict.fromkeys(("rms_norm", "rope", "scaled_dot_product_attention"), one_operation)


class MlxLm(Steps):
    """mlx-lm's own steps of a token each."""

    def __init__(self, model: Model):
        self.lm, self.cache = model.lm, make_prompt_cache(model.lm)
        self.token = mx.array([[1]])

    def describe(self) -> tuple[float, list[mx.array]]:
        with patch.object(gated_delta, "gated_delta_ops", one_delta), patch.multiple(mx.fast, **FAST):
            begun = time.thread_time()
            self.token = mx.argmax(self.lm(self.token, cache=self.cache), axis=-1)
            seconds = time.thread_time() - begun
        held = [each for cache in self.cache for each in cache.state if isinstance(each, mx.array)]
        return seconds, [self.token, *held]


def median_times(runs: dict[str, Steps], repeats: int) -> dict[str, float]:
    """Return the median of each in ms, measured in turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(-REMEMBERED, repeats):
        for name, steps in runs.items():
            seconds = steps.run(counts=repeat == -1)
            if repeat >= 0:
                times[name].append(seconds * 1e3)
    return {name: statistics.median(each) for name, each in times.items()}


def describe(names: list[str], depths: list[int], repeats: int) -> None:
    """Print how long a step takes to describe, and how many kernels it launches."""
    print("| model | k | described, CPU ms | of mlx-lm's step | our launches | MLX's |")
    print("| --- | --- | --- | --- | --- | --- |")
    mx.set_default_device(mx.cpu)
    with patch.object(mx.fast, "metal_kernel", launches.describe_only):
        for name in names:
            model = metal_model(name)
            runs: dict[str, Steps] = {str(k): Ours(model, k) for k in depths}
            runs["mlx-lm"] = MlxLm(model)
            medians = median_times(runs, repeats)
            for label, ms in medians.items():
                found, ratio = runs[label].launches, ms / medians["mlx-lm"]
                others = sum(count for each, count in found.items() if each not in {"Launch", *VIEWS})
                print(f"| {name} | {label} | {ms:.2f} | {ratio:.2f} | {found['Launch']} | {others} |", flush=True)
