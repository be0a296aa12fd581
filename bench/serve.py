"""What speculation does for a server: tokens a second of all clients together, with drafts and without.

    python bench/serve.py [--model NAME] [--concurrent 1 2 4 8 16] [--tokens 64] [--requests 2] [--repeats 7]

A server of its own process answers so many clients at a time, each `--requests` prompts after another, streamed,
greedy, `--tokens` tokens each. Every level runs with `num_draft_tokens` auto and 0 in turn, in the same server and
repeat, the order changing from repeat to repeat, so that a machine that is slow for a while is slow for both. Each
repeat gives one ratio; medians of them are given with 95 % intervals. Both ways must say the same text.
"""

import argparse
import asyncio
import json
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import httpx

from headstart.bench.interval import Estimate, estimate
from headstart.bench.machine import this_machine
from headstart.bench.prompts import Prompt, builtin_prompts

WAYS: dict[str, int | str] = {"auto": "auto", "off": 0}


@contextmanager
def serving(model: str | None) -> Iterator[str]:
    """The address of a server that keeps no prompts: the second to ask must not have it easier."""
    command = [Path(sysconfig.get_path("scripts")) / "headstart", "serve", *([model] if model else [])]
    options = ["--port", "0", "--prefix-cache-gb", "0", "--timeout", "3600"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        lines = dict(line.split(":", 1) for line in islice(process.stdout, 3))
        print(f"{lines['Model'].strip()}, speculation {lines['Speculation'].strip()}")
        yield lines["Address"].strip()
    finally:
        process.terminate()
        process.wait()


async def ask(http: httpx.AsyncClient, prompt: Prompt, tokens: int, k: int | str) -> tuple[str, int]:
    """The text of a streamed answer, and how many tokens it has."""
    asked: dict[str, Any] = {"max_tokens": tokens, "min_tokens": tokens, "num_draft_tokens": k, "stream": True}
    asked |= {"stream_options": {"include_usage": True}, "temperature": 0}  # the card's would differ every time
    path, field = ("chat/completions", "messages") if prompt.messages else ("completions", "prompt")
    text, said = "", 0
    async with http.stream("POST", path, json=asked | {field: prompt.messages or prompt.text}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            for choice in chunk["choices"]:
                text += choice["delta"].get("content", "") if prompt.messages else choice["text"]
            said = (chunk.get("usage") or {}).get("completion_tokens", said)
    return text, said


async def measure(
    address: str, prompts: list[Prompt], concurrent: int, requests: int, tokens: int, k: int | str
) -> tuple[float, list[list[str]]]:
    """Tokens a second of `concurrent` clients, and what they were told."""
    async with httpx.AsyncClient(base_url=address, timeout=3600) as http:

        async def client(number: int) -> list[tuple[str, int]]:
            own = islice(cycle(prompts), number * requests, (number + 1) * requests)
            return [await ask(http, prompt, tokens, k) for prompt in own]

        began = time.perf_counter()
        told = await asyncio.gather(*(client(number) for number in range(concurrent)))
        seconds = time.perf_counter() - began
    return sum(said for each in told for _, said in each) / seconds, [[text for text, _ in each] for each in told]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--concurrent", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=2, help="of each client, one after another")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()

    prompts, rates = builtin_prompts(), {(c, way): list[float]() for c in args.concurrent for way in WAYS}
    print(this_machine())
    with serving(args.model) as address:
        for repeat in range(-1, args.repeats):  # the first compiles, and what it took is forgotten
            for concurrent in args.concurrent:
                texts = {}
                for way in sorted(WAYS, reverse=repeat % 2 == 0):
                    rate, texts[way] = asyncio.run(
                        measure(address, prompts, concurrent, args.requests, args.tokens, WAYS[way])
                    )
                    if repeat >= 0:
                        rates[concurrent, way].append(rate)
                if texts["auto"] != texts["off"]:
                    raise SystemExit(f"at {concurrent} concurrent the two ways say different texts")

    print(f"\nTokens/s in all, {args.tokens} tokens a request, medians of {args.repeats}.\n")
    print("| concurrent | auto | off | auto / off | 95 % |")
    print("| ---: | ---: | ---: | ---: | --- |")
    for concurrent in args.concurrent:
        auto, off = estimate(rates[concurrent, "auto"]), estimate(rates[concurrent, "off"])
        ratio = ratio_of(rates[concurrent, "auto"], rates[concurrent, "off"])
        interval = f"{ratio.low:.2f}–{ratio.high:.2f}"
        print(f"| {concurrent} | {auto.median:.1f} | {off.median:.1f} | {ratio.median:.2f} | {interval} |")


def ratio_of(rates: list[float], to: list[float]) -> Estimate:
    """Of pairs that ran one after the other."""
    return estimate([a / b for a, b in zip(rates, to, strict=True)])


if __name__ == "__main__":
    main()
