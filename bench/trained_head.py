"""What a trained head earns: `.venv/bin/python bench/trained_head.py MODEL --head HEAD`.

The prompts are those of `headstart bench`, which `train-head` never uses: code, prose and chat. Tokens a round at a
fixed depth, greedy and at temperature 0.8, by the engine itself. `--minutes N` trains the head first, in the same
process, and goes on with one that is there: for a machine without a network, all of which is this and MODEL's folder.
"""

import argparse
import json
import sys
from pathlib import Path

import mlx.core as mx

from headstart.bench.prompts import builtin_prompts
from headstart.checkpoint import load_model, load_tokenizer, read_layout, resolve
from headstart.checkpoint.quantize import Recipe
from headstart.engine import Engine, Request, Stats
from headstart.models import Model
from headstart.sampling import SamplingParams
from headstart.state import PrefixCache
from headstart.training.train import Plan, Status, train

TOKENS = 128
CASES = ((1, 0.0), (2, 0.0), (3, 0.0), (2, 0.8))  # drafts a round, and the temperature
KINDS = ("code", "prose", "chat")


def tokens_per_round(model: Model, folder: Path, k: int, temperature: float, count: int) -> dict[str, float]:
    """Return tokens a round by kind of prompt."""
    tokenizer, found = load_tokenizer(folder), {}
    for kind in KINDS:
        prompts = [each.tokens(tokenizer) for each in builtin_prompts([kind])[:count]]
        engine = Engine(model, tokenizer, prefix=PrefixCache(0))
        params = SamplingParams(temperature=temperature, max_tokens=TOKENS, k=k)
        handles = [engine.submit(Request(prompt, params)) for prompt in prompts]
        ended = [list(handle)[-1].stats for handle in handles]
        found[kind] = Stats.of([each for each in ended if each is not None]).tokens_per_round
    return found


def show(status: Status) -> None:
    if status.doing == "measured":
        shown = f"{status.seconds:.0f} s, {status.text} tokens written, {status.trained} trained: {status.measured}"
        print(shown, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--minutes", type=float, help="train it first, until so many minutes in all")
    parser.add_argument("--prompts", type=int, default=4, help="of each kind")
    arguments = parser.parse_args()
    folder = resolve(arguments.model)
    if arguments.minutes:
        layout = read_layout(folder)
        bits = (layout.quantization or {}).get("bits")
        train(Plan(layout, arguments.head, arguments.minutes, Recipe(getattr(mx, layout.dtype), bits)), show)
    model = load_model(folder, head=arguments.head)
    for k, temperature in CASES:
        found = tokens_per_round(model, folder, k, temperature, arguments.prompts)
        mean = sum(found.values()) / len(found)
        print(json.dumps({"k": k, "temperature": temperature, "mean": mean, **found}), flush=True)


if __name__ == "__main__":
    main()
