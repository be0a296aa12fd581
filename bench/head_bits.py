"""Measure what quantising the head costs: `.venv/bin/python bench/head_bits.py [MODEL] [--markdown]`.

MODEL (raw; the built-in one by default) is converted with trunks and heads of several precisions, and each conversion
decodes the same prompts greedily with four drafts a round. Acceptance is cumulative: the share of rounds that
accepted at least so many drafts. The output depends on the trunk's bits and not on the head's, so the figures for one
trunk compare heads on the same text; the texts of different trunks differ.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx

from headstart.checkpoint import load_model, load_tokenizer, read_layout, resolve
from headstart.checkpoint.convert import convert, plan_conversion
from headstart.checkpoint.quantize import Recipe
from headstart.engine import Engine, Request
from headstart.sampling import SamplingParams

K, TOKENS = 4, 96
TRUNKS: tuple[int | None, ...] = (None, 8, 4)
HEADS: tuple[Any, ...] = ("keep", 8, 4)
TASKS = """\
Return the sum of all even numbers in a list.
Read a text file and count its words.
Check whether a string is a palindrome.
Merge two dictionaries, adding the values of equal keys.
Parse a date such as 2024-05-01 into year, month and day.
Remove duplicates from a list and keep the order.
Return the n-th Fibonacci number.
Split a list into chunks of a given size.
Write rows to a CSV file with a header.
Compute the mean and the standard deviation of some numbers.
Convert a nested list into a flat one.
Find the longest word in a sentence.
Retry a function a number of times before giving up.
Return the keys of a dictionary sorted by their values.
Download a file from a URL into a folder.
Validate an e-mail address with a regular expression.
"""


def measure(folder: Path, prompts: list[list[int]]) -> tuple[list[list[int]], list[float], float]:
    """Return the outputs, the acceptance by position, and the tokens per round."""
    engine = Engine(load_model(folder), load_tokenizer(folder), max_sequences=len(prompts))
    handles = [engine.submit(Request(p, SamplingParams(k=K, max_tokens=TOKENS))) for p in prompts]
    texts, stats = [], []
    for handle in handles:
        events = list(handle)
        texts.append([token for event in events for token in event.tokens])
        stats.append(events[-1].stats)
    drafted = [
        sum(s.proposed_by_position[j] for s in stats if s and j < len(s.proposed_by_position)) for j in range(K)
    ]
    accepted = [
        sum(s.accepted_by_position[j] for s in stats if s and j < len(s.accepted_by_position)) for j in range(K)
    ]
    rounds = sum(s.rounds for s in stats)
    tokens = sum(s.generation_tokens for s in stats)
    return texts, [a / b for a, b in zip(accepted, drafted, strict=True)], tokens / rounds


def main() -> None:
    names = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    source = resolve(names[0] if names else None)
    tokenizer = load_tokenizer(source)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": task}], add_generation_prompt=True)
        for task in TASKS.splitlines()
    ]
    prompts = [list(getattr(prompt, "input_ids", prompt)) for prompt in prompts]
    print("| trunk | head | 1 | 2 | 3 | 4 | tokens per round | head bytes |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for trunk in TRUNKS:
        expected: list[list[int]] | None = None
        for head in HEADS:
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "out"
                convert(plan_conversion(read_layout(source), out, Recipe(mx.bfloat16, trunk, mtp_bits=head)))
                texts, acceptance, per_round = measure(out, prompts)
                size = (out / "mtp/weights.safetensors").stat().st_size
            # Unquantised trunks of dense models compute in another type beside a quantised head, on CPU.
            assert expected in (None, texts) or trunk is None, "the head changed the output"
            expected = texts
            columns = " | ".join(f"{share:.1%}" for share in acceptance)
            label = f"{trunk} bits" if trunk else "bfloat16"
            print(f"| {label} | {head} | {columns} | {per_round:.2f} | {size:,} |", flush=True)


if __name__ == "__main__":
    main()
