"""Measure the memory that loading takes besides the weights: `.venv/bin/python bench/load_memory.py`.

Checkpoints of about 1 GB whose tensors are holes on disk, each loaded in a process of its own. `peak` is the most
that the process held over what it held before loading; the aim is at most 1.2 times the weights that stay.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

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
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from checkpoints import make_config, write_empty
    from headstart import models

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
    """Load in the child process, and print what it took in bytes and seconds."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from headstart.checkpoint import load_model

    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    mx.reset_peak_memory()
    started = time.perf_counter()
    # In the type of the file: cast to float32, as for experts on CPU, the source is only half of what stays.
    model = load_model(folder, dtype=mx.bfloat16)
    seconds = time.perf_counter() - started
    flat: Any = tree_flatten(model.weights.parameters())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - before
    stays = sum(array.nbytes for _, array in flat)
    print(json.dumps({"stays": stays, "peak": peak, "mlx_peak": mx.get_peak_memory(), "seconds": seconds}))


def main() -> None:
    print(f"{'checkpoint':<16} {'file GB':>8} {'stays GB':>9} {'peak RSS':>14} {'peak mlx':>14} {'seconds':>8}")
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            write_case(Path(folder), *case)
            size = (Path(folder) / "model.safetensors").stat().st_size
            child = [sys.executable, __file__, folder]
            found = json.loads(subprocess.run(child, check=True, capture_output=True, text=True).stdout)
        columns = [f"{found[k] / 1e9:.2f} ({found[k] / found['stays']:.2f} x)" for k in ("peak", "mlx_peak")]
        print(
            f"{name:<16} {size / 1e9:>8.2f} {found['stays'] / 1e9:>9.2f} {columns[0]:>14} {columns[1]:>14} "
            f"{found['seconds']:>8.1f}"
        )


if __name__ == "__main__":
    measure(sys.argv[1]) if len(sys.argv) > 1 else main()
