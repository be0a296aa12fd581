"""What a trained head earns: `.venv/bin/python bench/trained_head.py MODEL --head HEAD [--minutes N] [--prompts 4]`.

The prompts are those of `headstart bench`, which `train-head` never uses: code, prose and chat. Tokens a round at a
fixed depth, greedy and at temperature 0.8, by the engine itself. `--minutes N` trains the head first, in the same
process, and goes on with one that is there: for a machine without a network, all of which is this and MODEL's folder.
"""

import sys
from pathlib import Path

import mlx.core as mx
from harness import answers, line, options, table

from headstart.bench.prompts import builtin_prompts
from headstart.checkpoint import load_model, load_tokenizer, read_layout, resolve
from headstart.checkpoint.quantize import Recipe
from headstart.engine import Engine, Stats
from headstart.state import PrefixCache
from headstart.training.train import Status, TrainingPlan, train

TOKENS = 128
CASES = ((1, 0.0), (2, 0.0), (3, 0.0), (2, 0.8))  # drafts a round, and the temperature
KINDS = ("code", "prose", "chat")


def report(status: Status) -> None:
    if status.doing == "measured":
        counts = f"{status.text} tokens written, {status.trained} trained"
        print(f"{status.seconds:.0f} s, {counts}: {status.measured}", file=sys.stderr, flush=True)


def main() -> None:
    given = options(__doc__, "model", head="", minutes=0.0, prompts=4)
    if not given.head:
        raise SystemExit("name the head's folder with --head")
    folder, head = resolve(given.model), Path(given.head)
    if given.minutes:
        layout = read_layout(folder)
        recipe = Recipe(getattr(mx, layout.dtype), (layout.quantization or {}).get("bits"))
        train(TrainingPlan(layout, head, given.minutes, recipe), report)
    model, tokenizer = load_model(folder, head=head), load_tokenizer(folder)
    table("k", "temperature", "tokens a round", *KINDS)
    for k, temperature in CASES:
        found = []
        for kind in KINDS:
            prompts = [each.tokens(tokenizer) for each in builtin_prompts([kind])[: given.prompts]]
            engine = Engine(model, tokenizer, prefix=PrefixCache(0))
            done = answers(engine, prompts, temperature=temperature, max_tokens=TOKENS, k=k)
            found.append(Stats.of([each.stats for each in done]).tokens_per_round)
        line(k, temperature, sum(found) / len(found), *found)


if __name__ == "__main__":
    main()
