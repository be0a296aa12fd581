"""How long do 16 streams wait for their next token while 50 large bodies arrive? `python bench/bodies.py`

The bodies are within the limits, of all APIs, four at a time. Prints a Markdown table of the gaps between tokens, and
of the CPU time of the event loop's longest slice.
"""

import asyncio
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context

import httpx
from harness import ROOT, line, table

sys.path.insert(0, str(ROOT / "tests" / "server"))
STREAMS, TOKENS, BODIES, TOGETHER, MIB = 16, 500, 50, 4, 2**20


def bodies() -> list[tuple[str, str]]:
    part, empty = {"type": "text", "text": ""}, {"role": "user", "content": ""}
    parts = {"messages": [{"role": "user", "content": [part] * 2**14}] * 2, "max_tokens": 1}
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (50 * MIB)}}
    items = [{"role": "user", "content": [{"type": "input_text", "text": ""}] * 2**14}] * 2
    kinds = {
        "chat/completions": [parts, {"messages": [{"role": "user", "content": [picture]}]}],
        "messages": [parts],
        "responses": [{"input": items}, {"input": [empty] * 2**14, "truncation": "auto", "max_output_tokens": 1}],
        "completions": [{"prompt": "word " * 3_000_000}],
    }
    return [(path, json.dumps(body)) for path, known in kinds.items() for body in known]


async def talk(http: httpx.AsyncClient, what: str) -> list[float]:
    """Send bodies, or read streams and return the seconds between their tokens, or do nothing for a while."""
    known, places = bodies() if what == "50 bodies" else [], asyncio.Semaphore(TOGETHER)

    async def send(i: int) -> list[float]:
        path, body = known[i % len(known)]
        async with places:
            await http.post(path, content=body, headers={"Content-Type": "application/json"})
        return []

    async def read(i: int) -> list[float]:
        body = {"prompt": "x", "max_tokens": TOKENS, "min_tokens": TOKENS, "seed": i, "stream": True}
        async with http.stream("POST", "completions", json=body) as answer:
            times = [time.perf_counter() async for line in answer.aiter_lines() if line.startswith("data: {")]
        return [after - before for before, after in pairwise(times[STREAMS:])]

    await asyncio.sleep(20 if what == "nothing" else 0)
    asked = {"50 bodies": map(send, range(BODIES)), "streams": map(read, range(STREAMS))}.get(what, ())
    return [gap for gaps in await asyncio.gather(*asked) for gap in gaps]


def run(what: str, url: str) -> list[float]:
    return asyncio.run(talk(httpx.AsyncClient(base_url=f"{url}/v1/", timeout=600), what))


def main() -> None:
    from running import Limits, running

    slices, run_handle = [0.0], asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        begun = time.thread_time()
        run_handle(handle)
        slices.append(time.thread_time() - begun)

    asyncio.Handle._run = timed
    limits = Limits(body_bytes=64 * MIB)
    with running(max_sequences=32, limits=limits) as here, ProcessPoolExecutor(2, get_context("spawn")) as clients:
        clients.submit(run, "streams", here.url).result()
        table("beside", "median gap, ms", "99%", "longest", "slice, CPU ms")
        for other in ("nothing", "50 bodies"):
            slices.clear()
            sent, gaps = clients.submit(run, other, here.url), list[float]()
            while not sent.done():
                gaps = sorted(gaps + clients.submit(run, "streams", here.url).result())
            figures = (gaps[len(gaps) // 2], gaps[len(gaps) * 99 // 100], gaps[-1], max(slices))
            line(other, *[1e3 * each for each in figures])


if __name__ == "__main__":
    main()
