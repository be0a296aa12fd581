"""Are the tokens the same for every depth, batch and rule? `python bench/invariance.py [MODEL] [--device gpu]`

Every prompt is answered at every k, greedily and with each of --seeds, in batches of --batch-size, and compared with
the first run. The last column is the result of the engine's own short check of this device.
"""

from itertools import product

import mlx.core as mx
from harness import Answer, answers, line, options, table

from headstart.bench.prompts import BenchPrompt
from headstart.checkpoint import load_model, load_tokenizer, resolve
from headstart.engine import Engine, Stats

VERBS = ("get", "set", "load", "save", "parse", "merge", "count", "find")
NOUNS = ("user", "config", "file", "token", "matrix", "date", "path", "queue")
TASKS = [f"Write a Python function `{v}_{n}`: {v.title()} the {n} that is given." for n in NOUNS for v in VERBS]


def main() -> None:
    given = options(
        __doc__, "model", device="cpu", dtype=None, prompts=8, tokens=48, batch_size=[8], k=list(range(9)), seeds=[]
    )
    mx.set_default_device(mx.gpu if given.device == "gpu" else mx.cpu)
    folder = resolve(given.model)
    tokenizer = load_tokenizer(folder)
    model = load_model(folder, dtype=getattr(mx, given.dtype) if given.dtype else None)
    tasks = (TASKS * given.prompts)[: given.prompts]
    prompts = [BenchPrompt(messages=({"role": "user", "content": task},)).tokens(tokenizer) for task in tasks]
    first: dict[int | None, list[Answer]] = {}
    table("", "batch size", "k", "identical to the first", "tokens per round", "acceptance by position", "exact")
    for seed, batch, k in product([None, *given.seeds], given.batch_size, given.k):
        engine = Engine(model, max_sequences=batch)
        temperature = 0.0 if seed is None else 0.8
        done = answers(engine, prompts, max_tokens=given.tokens, k=k, seed=seed, temperature=temperature)
        same = sum(a.tokens == b.tokens for a, b in zip(done, first.setdefault(seed, done), strict=True))
        stats = Stats.of([each.stats for each in done])
        counts = zip(stats.accepted_by_position, stats.proposed_by_position, strict=True)
        shares = " ".join(f"{a / p:.0%}" for a, p in counts if p)
        kind = "greedy" if seed is None else f"seed {seed}"
        exact = "yes" if stats.exact else "no"
        line(kind, batch, k, f"{same} of {len(done)}", stats.tokens_per_round, shares, exact)


if __name__ == "__main__":
    main()
