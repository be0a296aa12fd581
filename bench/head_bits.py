"""Measure what quantising the head costs: `.venv/bin/python bench/head_bits.py [MODEL]`.

MODEL (raw; the built-in one by default) is converted with trunks and heads of several precisions, and each conversion
decodes the same prompts greedily with four drafts a round. Acceptance is cumulative: the share of rounds that
accepted at least so many drafts. The output depends on the trunk's bits and not on the head's, so the figures for one
trunk compare heads on the same text; the texts of different trunks differ.
"""

import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
from harness import answers, line, options, table
from invariance import TASKS

from headstart.bench.prompts import BenchPrompt
from headstart.checkpoint import load_model, load_tokenizer, read_layout, resolve
from headstart.checkpoint.convert import convert, plan_conversion
from headstart.checkpoint.quantize import Recipe
from headstart.engine import Engine, Stats

K, TOKENS, PROMPTS = 4, 96, 16
TRUNKS: tuple[int | None, ...] = (None, 8, 4)
HEADS: tuple[Any, ...] = ("keep", 8, 4)


def main() -> None:
    source = resolve(options(__doc__, "model").model)
    tokenizer = load_tokenizer(source)
    prompts = [BenchPrompt(messages=({"role": "user", "content": task},)).tokens(tokenizer) for task in TASKS]
    expected: dict[int | None, list[list[int]]] = {}
    table("trunk", "head", *map(str, range(1, K + 1)), "tokens per round", "head bytes")
    for trunk, head in product(TRUNKS, HEADS):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out"
            convert(plan_conversion(read_layout(source), out, Recipe(mx.bfloat16, trunk, mtp_bits=head)))
            engine = Engine(load_model(out), max_sequences=PROMPTS)
            done = answers(engine, prompts[:PROMPTS], k=K, max_tokens=TOKENS)
            size = (out / "mtp/weights.safetensors").stat().st_size
        texts, stats = [each.tokens for each in done], Stats.of([each.stats for each in done])
        # Unquantised trunks of dense models compute in another type beside a quantised head, on CPU.
        assert expected.setdefault(trunk, texts) == texts or trunk is None, "the head changed the output"
        counts = zip(stats.accepted_by_position, stats.proposed_by_position, strict=True)
        label = f"{trunk} bits" if trunk else "bfloat16"
        line(label, head, *[f"{a / b:.1%}" for a, b in counts], stats.tokens_per_round, f"{size:,}")


if __name__ == "__main__":
    main()
