"""What every rank of a test runs. The job is JSON; the last line of its output is JSON too.

A job has a `split` and `models`, each a folder with `tasks`: requests that are made together, one task after the
other. It may give the bytes of the prefix `cache`, and of the sequences on each rank (`memory`). `stream` instead of
tasks: a line for every event, for tests that interfere. `mute`: a rank that fails to emit its third round.
`unanswered`: the first rank begins a collective with one that stands still, and fails.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import mlx.core as mx

import headstart.engine.scheduler
from headstart.cluster import SharedPrefix, follow, join_machines, lead, load_part
from headstart.cluster.communicator import Communicator
from headstart.engine import DepthController, Engine, Event, Handle, Request
from headstart.engine.depth import DraftHistory, Plan
from headstart.engine.sequence import SequenceState
from headstart.limits import MAX_K
from headstart.sampling import GrammarSpec, SamplingParams

ANSWER = 16  # tokens that are counted ahead: so long answers are let in together


@contextmanager
def noted() -> Iterator[dict[int, dict[str, Any]]]:
    """Record the events of every request, in order of submission: tokens and log-probabilities of its answers, and
    how they ended. Followers' sequences have no client."""
    said: dict[int, dict[str, Any]] = {}
    kept: list[Handle] = []  # an id is only good for as long as its owner lives
    make, put = Handle.__init__, Handle.put

    def note_request(handle: Handle, *arguments: Any) -> None:
        make(handle, *arguments)
        kept.append(handle)
        said[id(handle)] = {"answers": {}, "ends": {}}

    def note(handle: Handle, event: Event) -> None:
        told = said[id(handle)]
        scores = [each.logprob for each in event.logprobs or ()]
        told["answers"].setdefault(event.choice, []).extend(zip(event.tokens, scores, strict=True))
        if event.finish_reason is not None:
            told["ends"][event.choice] = [event.finish_reason, event.stop, event.error and str(event.error)]
        put(handle, event)

    Handle.__init__, Handle.put = note_request, note  # type: ignore[method-assign]
    yield said
    Handle.__init__, Handle.put = make, put  # type: ignore[method-assign]


class Restless(DepthController):
    """Another depth every time, as a clock might have it."""

    def choose(self, rows: Sequence[DraftHistory], most: int = MAX_K) -> Plan:
        super().choose(rows)
        return Plan(self._round % 5)


def request(each: dict[str, Any]) -> Request:
    params = dict(each["params"])
    if "grammar" in params:
        params["grammar"] = GrammarSpec("regex", params["grammar"])
    return Request(each["prompt"], SamplingParams(**params), each.get("n", 1))


def ask(engine: Engine, tasks: list[list[dict[str, Any]]], comm: Communicator | None = None) -> list[dict[str, Any]]:
    told, gave_up, put_back = [], [], engine.scheduler.queue.put_back

    def note(row: SequenceState) -> None:
        gave_up.append(row)
        put_back(row)

    engine.scheduler.queue.put_back = note  # type: ignore[method-assign]
    for task in tasks:
        if task[0].get("after_clearing"):
            engine.clear_prefix()
        before = comm.operations if comm is not None else 0
        handles = [engine.submit(request(each), max_k=each.get("max_k", MAX_K)) for each in task]
        for handle, each in zip(handles, task, strict=True):
            for events, event in enumerate(handle, 1):
                if events == each.get("cancelled_after"):
                    handle.cancel()
                stats = event.stats
        while engine.run_once():  # what is still in flight
            pass
        assert stats is not None
        operations = comm.operations - before if comm is not None else 0
        told.append({"operations": operations, "gave_up": len(gave_up), "stats": stats.as_dict()})
        gave_up.clear()
    return told


def emit_two_rounds() -> None:
    emit, rounds = SequenceState.emit, []

    def mute(sequence: SequenceState, *generated: Any) -> None:
        rounds.append(generated)
        if len(rounds) > 2:
            raise ValueError("mute")
        emit(sequence, *generated)

    SequenceState.emit = mute  # type: ignore[method-assign]


def main(job: dict[str, Any]) -> None:
    headstart.engine.scheduler.ANSWER = ANSWER
    with join_machines() as machines:
        if "unanswered" in job:
            if machines.rank:
                os.kill(os.getpid(), signal.SIGSTOP)
            mx.async_eval(machines.comm.gather(mx.zeros((1 << 20,))))
            raise ValueError("of the first rank")
        if job.get("mute") == machines.rank:
            emit_two_rounds()
        results = []
        for each in job["models"]:
            folder = each["folder"].format(rank=machines.rank)
            model, tokenizer = load_part(folder, machines.comm, job["split"], dtype=mx.float32)
            cache = SharedPrefix(each.get("cache", 10**8), eight_bits="cache" in each)
            room: dict[str, Any] = {"prefix": cache}
            if "memory" in each:
                room["memory_limit"] = each["memory"][machines.rank]
            with noted() as said:
                if machines.rank:
                    follow(machines, model, tokenizer, **room).run()
                    tasks = []
                else:
                    leader = lead(machines, model, tokenizer, max_sequences=3, **room)
                    leader.depth = Restless()
                    if "stream" in each:
                        params = SamplingParams(max_tokens=4000, k=3, logprobs=True)
                        for event in leader.submit(Request(each["stream"], params)):
                            print(event.tokens, flush=True)
                    tasks = ask(leader, each["tasks"], machines.comm)
                    machines.link.broadcast(None)
            results.append({"said": list(said.values()), "cache": asdict(cache.stats()), "tasks": tasks})
    print(json.dumps(results))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
