"""Are the tokens the same for every depth, batch and rule? `python bench/invariance.py [MODEL] [--device gpu]`

Every prompt is answered at every k, greedily and with each of --seeds, in batches of --batch-size, and compared with
the first run. `--workers` runs depths in processes of their own (CPU only). The last column is the result of the
engine's own short check of this device.
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import mlx.core as mx

from headstart.checkpoint import load_model, load_tokenizer, resolve
from headstart.engine import Engine, Request
from headstart.sampling import SamplingParams

VERBS = ("get", "set", "load", "save", "parse", "merge", "count", "find")
NOUNS = ("user", "config", "file", "token", "matrix", "date", "path", "queue")
TASKS = [f"Write a Python function `{v}_{n}`: {v.title()} the {n} that is given." for n in NOUNS for v in VERBS]


class Run(NamedTuple):
    answers: list[list[int]]
    rounds: int
    accepted: list[int]
    proposed: list[int]
    exact: bool


def run(
    model: str | None, device: str, dtype: str | None, k: int, batch: int, count: int, tokens: int, seed: int | None
) -> Run:
    mx.set_default_device(mx.gpu if device == "gpu" else mx.cpu)
    folder = resolve(model)
    tokenizer = load_tokenizer(folder)
    engine = Engine(load_model(folder, dtype=getattr(mx, dtype) if dtype else None), max_sequences=batch)
    params = SamplingParams(max_tokens=tokens, k=k, seed=seed, temperature=0.0 if seed is None else 0.8)
    handles = []
    for task in (TASKS * count)[:count]:
        chat = [{"role": "user", "content": task}]
        prompt = list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, enable_thinking=False))
        handles.append(engine.submit(Request(prompt, params)))
    ends = [list(handle) for handle in handles]
    stats = [events[-1].stats for events in ends]
    accepted, proposed = [0] * k, [0] * k
    for each in stats:
        assert each is not None
        for j in range(len(each.proposed_by_position)):
            accepted[j] += each.accepted_by_position[j]
            proposed[j] += each.proposed_by_position[j]
    answers = [[token for event in events for token in event.tokens] for events in ends]
    return Run(answers, sum(s.rounds for s in stats if s), accepted, proposed, all(s.exact for s in stats if s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--dtype")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[8])
    parser.add_argument("--k", type=int, nargs="+", default=list(range(9)))
    parser.add_argument("--seeds", type=int, nargs="*", default=[])
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()

    cases = [(seed, batch, k) for seed in [None, *given.seeds] for batch in given.batch_size for k in given.k]
    arguments = [
        (given.model, given.device, given.dtype, k, batch, given.prompts, given.tokens, seed)
        for seed, batch, k in cases
    ]
    if given.workers > 1:
        with ProcessPoolExecutor(given.workers, mp_context=get_context("spawn")) as pool:
            runs = list(pool.map(run, *zip(*arguments, strict=True)))
    else:
        runs = [run(*each) for each in arguments]

    print("| | batch size | k | identical to the first | tokens per round | acceptance by position | exact |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    first: dict[int | None, Run] = {}
    for (seed, batch, k), done in zip(cases, runs, strict=True):
        plain = first.setdefault(seed, done)
        same = sum(a == b for a, b in zip(done.answers, plain.answers, strict=True))
        shares = " ".join(f"{a / p:.0%}" for a, p in zip(done.accepted, done.proposed, strict=True) if p)
        tokens = sum(map(len, done.answers))
        kind = "greedy" if seed is None else f"seed {seed}"
        print(
            f"| {kind} | {batch} | {k} | {same} of {len(done.answers)} | {tokens / done.rounds:.2f} | {shares} "
            f"| {'yes' if done.exact else 'no'} |"
        )


if __name__ == "__main__":
    main()
