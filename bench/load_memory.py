"""Measure the memory that loading takes besides the weights: `.venv/bin/python bench/load_memory.py`.

Checkpoints of about 1 GB whose tensors are holes on disk, each loaded in a process of its own. `peak` is the most
that the process held over what it held before loading; the aim is at most 1.2 times the weights that stay.
"""

import json
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
from harness import Worker, line, seconds_of, table
from mlx.utils import tree_flatten

from checkpoints import make_config, write_empty
from headstart import models
from headstart.checkpoint import load_model

COMMON = {
    "vocab_size": 32000, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip
MOE = {"num_hidden_layers": 12, "num_experts": 64, "moe_intermediate_size": 192}
CASES: dict[str, tuple[str, bool, dict[str, int]]] = {
    "dense": ("dense", False, {"num_hidden_layers": 24, "intermediate_size": 3584}),
    "moe, per expert": ("moe", False, MOE),
    "moe, fused": ("moe", True, MOE),
}


def write_case(folder: Path, family: str, fused: bool, sizes: dict[str, int]) -> None:
    config = make_config(family, tie=False, dtype=mx.bfloat16, **COMMON, **sizes)
    flat: Any = tree_flatten(models.build(json.loads(json.dumps(config))).weights.parameters())
    shapes: dict[str, list[int]] = {}
    for name, array in flat:
        shape = list(array.shape)
        raw = name if name.startswith(("mtp.", "lm_head.")) else f"model.language_model.{name}"
        block, _, projection = raw.partition(".switch_mlp.")
        if not projection:
            shapes[raw] = [shape[0], 1, shape[1]] if raw.endswith("conv1d.weight") else shape
        elif not fused:
            shapes |= {f"{block}.experts.{e}.{projection}": shape[1:] for e in range(shape[0])}
        elif projection == "down_proj.weight":
            shapes[f"{block}.experts.down_proj"] = shape
        else:
            shapes[f"{block}.experts.gate_up_proj"] = [shape[0], 2 * shape[1], shape[2]]
    write_empty(folder, config, shapes)


def measure(folder: str) -> None:
    """Load in this process, and print what it took in bytes and seconds."""
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    before, loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, []
    mx.reset_peak_memory()
    # In the type of the file: cast to float32, as for experts on CPU, the source is only half of what stays.
    seconds = seconds_of(lambda: loaded.append(load_model(folder, dtype=mx.bfloat16)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - before
    flat: Any = tree_flatten(loaded[0].weights.parameters())
    stays = sum(array.nbytes for _, array in flat)
    print(json.dumps({"stays": stays, "peak": peak, "mlx_peak": mx.get_peak_memory(), "seconds": seconds}))


def main() -> None:
    table("checkpoint", "file GB", "stays GB", "peak RSS, GB", "to what stays", "peak of MLX", "to what stays", "s")
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            write_case(Path(folder), *case)
            size = (Path(folder) / "model.safetensors").stat().st_size
            found = Worker(sys.executable, __file__, folder).what
        stays = found["stays"]
        peaks = [cell for peak in (found["peak"], found["mlx_peak"]) for cell in (peak / 1e9, peak / stays)]
        line(name, size / 1e9, stays / 1e9, *peaks, found["seconds"])


if __name__ == "__main__":
    measure(sys.argv[1]) if len(sys.argv) > 1 else main()
