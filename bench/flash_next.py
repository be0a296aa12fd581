"""Time steps of a synthetic Qwen3.8-Flash-Next on this machine, beside MLX's own operations, and what drafts cost.

    python bench/flash_next.py [--rounds 9]

Random weights in float32, which MLX's own experts need: the shape of the release, smaller. All measurements take
turns in one process, in CPU seconds of all threads, and the medians count, so that a busy machine matters little.
"""

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from headstart.checkpoint import load_model
from headstart.engine.batch import Batch
from headstart.engine.step import prefill_prompts, step
from headstart.models import Model

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from flash_next import write_flash_next

SIZES = {
    "vocab_size": 16384, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "head_dim": 64,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "num_experts": 32,
    "num_experts_per_tok": 4, "moe_intermediate_size": 192, "shared_expert_intermediate_size": 192, "hc_lowrank": 64,
    "indexer_n_heads": 4, "indexer_head_dim": 64, "indexer_budget": 256, "ple_layer_ids": [2], "ple_embed_dim": 512,
    "heads_per_ngram": 8, "ngram_vocab_size_base": 20000, "make_ngram_vocab_size_divisible_by": 128,
}  # fmt: skip
PROMPTS = (64, 1024)  # tokens, below the budget and past it
STEPS = 4


def cost(model: Model, batch: Batch, k: int) -> float:
    """CPU milliseconds of a step."""
    start = time.process_time()
    for _ in range(STEPS):
        mx.eval(step(model, batch, k).verdict.tokens, batch.arrays())
    return (time.process_time() - start) / STEPS * 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ours = load_model(write_flash_next(Path(folder), dtype=mx.bfloat16, **SIZES), dtype=mx.float32)
    wide = replace(ours, backend=ours.backend.stock())
    count = sum(a.size for _, a in tree_flatten(ours.weights.parameters()))
    print(
        f"{count / 1e6:.0f}M parameters, and {ours.tables[0].shape.rows * 32 / 1e6:.0f}M in a table; {ours.backend}"
    )
    for length in PROMPTS:
        prompt = [(7 * i) % 16001 + 9 for i in range(length)]
        cases = [("k = 0, stock", wide, 0), *((f"k = {k}", ours, k) for k in (0, 1, 2, 3))]
        batches = {name: prefill_prompts(ours, [prompt], k) for name, _, k in cases}
        times: dict[str, list[float]] = {name: [] for name, _, _ in cases}
        for _ in range(options.rounds):
            for name, model, k in cases:
                times[name].append(cost(model, batches[name], k))
        plain = statistics.median(times["k = 0"])
        for name, each in times.items():
            median = statistics.median(each)
            print(f"{length:5} tokens, {name:12} {median:8.2f} ms   {median / plain:5.2f}")


if __name__ == "__main__":
    main()
