"""`python -m training.evaluate_drafter DRAFTER …`: what block drafters earn beside the head, on held-out texts.

Automatic depth with each drafter (and the head) beside automatic depth with the head alone and plain decoding, one
greedy text at a time, in turns. Ratios are taken within a repeat; the first repeat warms up. Needs headstart alone.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from headstart import Engine, Request, SamplingParams, load
from headstart.engine import Event, Stats
from headstart.models import Model

from .evaluate import PROMPT, _line, _rendered
from .held_out import held_out

ANSWER = 128  # tokens that are generated
HEAD, PLAIN = "head", "k = 0"


@dataclass(frozen=True)
class Run:
    seconds: float  # after the first step
    tokens: list[int]
    stats: Stats


def decode(model: Model, prompt: list[int], plain: bool) -> Run:
    engine, events = Engine(model, max_sequences=1), list[Event]()
    params = SamplingParams(max_tokens=ANSWER, k=0 if plain else "auto")
    engine.submit(Request(prompt, params), listener=events.append)
    engine.prefill_all()
    started = 0.0
    while engine.run_once():
        if not started and any(event.tokens for event in events):
            started = time.perf_counter()
    seconds, last = time.perf_counter() - started, events[-1]
    if last.error is not None or last.stats is None:
        raise last.error or RuntimeError("no statistics")
    return Run(seconds, [token for event in events for token in event.tokens], last.stats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("drafters", nargs="+", type=Path)
    parser.add_argument("--model", default="tiny-qwen3.5")
    parser.add_argument("--texts", type=int, default=8, help="files, and as many conversations")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    head, tokenizer = load(given.model)
    models = {PLAIN: head, HEAD: head} | {each.name: load(given.model, drafter=each)[0] for each in given.drafters}
    texts = held_out()
    prompts = {
        "code": [list(tokenizer.encode(text))[:PROMPT] for text in texts.code[: given.texts]],
        "chat": [_rendered(tokenizer, chat, answered=False) for chat in texts.chats[: given.texts]],
    }
    heads = ("text", "drafts", "tokens/s", "to the head", "lowest", "highest", "tokens per round", "by the drafter")
    print(_line(heads), _line(["---"] * len(heads)), sep="\n", flush=True)
    for kind, several in prompts.items():
        runs: dict[str, list[list[Run]]] = {name: [] for name in models}  # by repeat
        for repeat in range(given.repeats + 1):
            for name in models:
                runs[name].append([])
            for number, prompt in enumerate(several):
                turn = (repeat + number) % len(models)
                for name in [*models][turn:] + [*models][:turn]:
                    runs[name][-1].append(decode(models[name], prompt, name == PLAIN))
                if any(runs[name][-1][-1].tokens != runs[PLAIN][-1][-1].tokens for name in models):
                    raise SystemExit(f"{kind} {number}: the text is not that of plain decoding")
        spent = {name: [sum(run.seconds for run in each) for each in turns[1:]] for name, turns in runs.items()}
        for name, turns in runs.items():
            measured = [run for each in turns[1:] for run in each]
            ratios = [a / b for a, b in zip(spent[HEAD], spent[name], strict=True)]
            tokens, rounds = sum(len(run.tokens) for run in measured), sum(run.stats.rounds for run in measured)
            accepted = sum(run.stats.accepted_by_source["drafter"] for run in measured)
            ranges = [f"{value:.2f}" for value in (median(ratios), min(ratios), max(ratios), tokens / rounds)]
            rate = tokens / given.repeats / median(spent[name])
            print(_line([kind, name, f"{rate:.0f}", *ranges, f"{accepted / tokens:.0%}"]), flush=True)


if __name__ == "__main__":
    main()
