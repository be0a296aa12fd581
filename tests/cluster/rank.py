"""What every rank of a test runs. The job is JSON in a file; the last line of its output is JSON too.

A job has a `split` and `models`, each a folder with `tasks`: requests that are made together, one task after the
other. `stream` instead of tasks: a line for every event, for tests that interfere.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from headstart.cluster import Follower, Leader, Machines, SharedPrefix, join, load
from headstart.cluster.engine import Chosen
from headstart.engine import Depth, Event, Handle, Request
from headstart.engine.depth import Drafter
from headstart.sampling import SamplingParams


@contextmanager
def noted() -> Iterator[dict[int, list[tuple[int, float]]]]:
    """What every request is told, tokens and their log-probabilities, in the order in which they came in. Nobody asks
    a follower's rows."""
    said: dict[int, list[tuple[int, float]]] = {}
    kept: list[Handle] = []  # an id is only good for as long as its owner lives
    put = Handle.put

    def note(handle: Handle, event: Event) -> None:
        if id(handle) not in said:
            kept.append(handle)
        scores = [each.logprob for each in event.logprobs or ()]
        said.setdefault(id(handle), []).extend(zip(event.tokens, scores, strict=True))
        put(handle, event)

    Handle.put = note  # type: ignore[method-assign]
    yield said
    Handle.put = put  # type: ignore[method-assign]


class Restless(Depth):
    """Another depth every time, as a clock might have it."""

    def choose(self, rows: Sequence[Drafter]) -> int:
        super().choose(rows)
        return self._round % 5


def lead(engine: Leader, machines: Machines, tasks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    told = []
    for task in tasks:
        if task[0].get("after_clearing"):
            assert engine.prefix is not None
            engine.prefix.clear()
        before = machines.wire.operations
        handles = [engine.submit(Request(each["prompt"], SamplingParams(**each["params"]))) for each in task]
        for handle, each in zip(handles, task, strict=True):
            for events, event in enumerate(handle, 1):
                if events == each.get("cancelled_after"):
                    handle.cancel()
                stats = event.stats
        while engine.turn():  # what is still in flight
            pass
        assert stats is not None
        operations = machines.wire.operations - before
        told.append({"operations": operations, "rounds": stats.rounds, "stats": stats.as_dict()})
    return told


def main(job: dict[str, Any]) -> None:
    with join() as machines:
        results = []
        for each in job["models"]:
            folder = each["folder"].format(rank=machines.rank)
            model, _ = load(folder, machines.wire, job["split"], dtype=mx.float32)
            with noted() as said:
                if machines.rank:
                    Follower(machines, model, prefix=SharedPrefix(10**8)).run()
                    results.append({"said": list(said.values())})
                    continue
                leader = Leader(machines, model, max_rows=3, prefix=SharedPrefix(10**8))
                leader.depth = Chosen(Restless(), machines)
                if "stream" in each:
                    request = Request(each["stream"], SamplingParams(max_tokens=4000, k=3, logprobs=True))
                    for event in leader.submit(request):
                        print(event.tokens, flush=True)
                tasks = lead(leader, machines, each["tasks"])
                results.append({"said": list(said.values()), "tasks": tasks})
                machines.link.decide(None)
    print(json.dumps(results))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
