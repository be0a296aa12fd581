"""What a block drafter earns whole models on this card, beside their own head.

    python bench/gpu_blocks.py 27b      a model of this shape and a DFlash drafter of the released shape, both with
    python bench/gpu_blocks.py 35b      random 4-bit weights: a step by length of the block, tokens/s with an imposed
    python bench/gpu_blocks.py tiny     acceptance beside the head at k = 3, and what the controller takes

The acceptance is geometric, with as many tokens per round as dflash-mlx 0.1.8 publishes for 1,024 tokens. Everything
takes turns; in the first every pass is compiled, of the others the median counts. `tiny` only shows that the script
runs.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from gpu import ACCEPTANCE, TURNS, prompts, step_seconds
from harness import line, note, ratio, table, turns
from imposed_acceptance import decode_imposed, record
from random_model import SHAPES, quantises, random_model

from headstart.engine.depth import DepthController
from headstart.engine.draft import Source
from headstart.engine.draft_history import DraftHistory
from headstart.engine.step import step
from headstart.engine.step_time import Cell
from headstart.kernels.norms import use_float32_norms
from headstart.models import Model
from headstart.models.dflash import DFlash, DFlashSpec, DFlashWeights

LENGTHS = (1, 3, 5, 7, 9, 12, 15)
HEAD = 3  # drafts of the head that the blocks are compared with
TOKENS_PER_ROUND = {"27b": 1 / (1 - 0.8467), "35b": 1 / (1 - 0.8926), "tiny": 4.0}
TINY = SHAPES["27b"] | {
    "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 8, "intermediate_size": 256, "head_dim": 64,
    "num_attention_heads": 2, "num_key_value_heads": 1, "linear_num_value_heads": 16,
}  # fmt: skip


def with_drafter(model: Model) -> Model:
    """Return the model with a random drafter of five layers, four of them sliding, as those of the 27B."""
    layers, hidden = int(model.config["num_hidden_layers"]), int(model.config["hidden_size"])
    config: dict[str, Any] = {
        "model_type": "qwen3", "hidden_size": hidden, "num_hidden_layers": 5, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 17408 * hidden // 5120 // 64 * 64,
        "rms_norm_eps": 1e-6, "vocab_size": model.vocabulary, "max_position_embeddings": 262144,
        "rope_theta": 1e7, "tie_word_embeddings": False, "block_size": 16, "mask_token_id": model.vocabulary - 1,
        "target_layer_ids": [1 + n * (layers - 4) // 4 for n in range(5)], "sliding_window": 2048,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    }  # fmt: skip
    spec = DFlashSpec.of(config)
    weights = DFlashWeights(config, spec)
    use_float32_norms(weights)
    for _, module in weights.named_modules():
        if isinstance(module, nn.Linear):
            module.weight = module.weight.astype(model.dtype)
    nn.quantize(weights, group_size=64, bits=4, class_predicate=quantises)
    mx.eval(weights.parameters())
    return replace(model, drafter=DFlash(spec, weights))


def geometric(tokens_per_round: float, k: int = 15) -> list[float]:
    """Return survival by position, of one rate, such that 1 + their sum is `tokens_per_round`."""
    low, high = 0.0, 1.0
    for _ in range(50):
        rate = (low + high) / 2
        low, high = (rate, high) if 1 + sum(rate**j for j in range(1, k + 1)) < tokens_per_round else (low, rate)
    return [rate**j for j in range(1, k + 1)]


def choice(seconds: dict[Cell, float], head: Sequence[float], block: Sequence[float], max_k: int) -> str:
    """Return what the controller plans once it knows these step times and acceptance rates."""
    limits = {Source.BLOCK: len(block), Source.HEAD: max_k}
    controller = DepthController(len(block), 2, [*limits], limits)
    controller.step_time.calibrate({cell: [each] for cell, each in seconds.items()})
    history = DraftHistory(len(block), memory=0.999)
    for source, survival in ((Source.HEAD, head), (Source.BLOCK, block)):
        rates = [after / before for before, after in zip([1.0, *survival], survival, strict=False)]
        for j, rate in enumerate(rates):
            for n in range(200):
                history.count((source, j), n < 200 * rate)
    plan = controller.plan([history], [None])
    return f"{Source(plan.source).name.lower()}, k = {plan.k}"


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "27b"
    if name != "tiny":
        mx.set_default_device(mx.gpu)
    model = with_drafter(random_model(TINY if name == "tiny" else SHAPES[name])[0])
    print(f"{name}: {mx.get_active_memory() / 1e9:.1f} GB", flush=True)
    head, block = ACCEPTANCE.get(name, ACCEPTANCE["27b"]), geometric(TOKENS_PER_ROUND[name])
    cells = [Cell(1, 0), Cell(1, HEAD), *(Cell(1, k, Source.BLOCK) for k in LENGTHS)]
    asked = [[token % model.vocabulary for token in each] for each in prompts(1)]
    repeats, tokens = (1, 40) if name == "tiny" else (TURNS, 200)
    recording = record(model, asked, tokens)

    def measure(cell: Cell) -> tuple[float, float]:
        """Return the seconds of a step, and the tokens/s."""
        seconds = step_seconds(model, asked, cell.k, advance=partial(step, source=cell.source))
        pattern = block if cell.source == Source.BLOCK else head
        return seconds, decode_imposed(model, recording, cell.k, pattern, cell.source).rate

    found = turns({cell: partial(measure, cell) for cell in cells}, repeats)
    seconds, rates = ({cell: [pair[i] for pair in each] for cell, each in found.items()} for i in (0, 1))
    table("source", "k", "ms a step", "to k = 0", "tokens/s", "lowest", "highest", f"to the head at k = {HEAD}")
    for cell, each in rates.items():
        took, source = median(seconds[cell]), Source(cell.source).name.lower() if cell.k else "none"
        speeds = (median(each), min(each), max(each))
        line(source, cell.k, 1e3 * took, took / median(seconds[cells[0]]), *speeds, ratio(each, rates[cells[1]]))
        note(f"{name} blocks {cell.source} {cell.k}", [seconds[cell], each])
    medians = {cell: median(each) for cell, each in seconds.items()}
    print("the controller takes", choice(medians, head, block, len(head)), flush=True)


if __name__ == "__main__":
    main()
