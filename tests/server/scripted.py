"""A server whose model generates scripted text, so that every form of output can be tried on real clients.

Only the device is missing: prompts are prepared, and tokens, stop strings, limits, grammars, events and stats go
through the engine's own sequences. A script that the grammar does not permit fails as a model's output would.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from running import Running, running, tokenizer

from headstart.engine import Engine, EngineThread, Request
from headstart.engine.sequence import SequenceState


class ScriptedRoom(EngineThread):
    """Says one text after another, one for each answer, in bursts of up to so many tokens."""

    def __init__(self, engine: Engine, burst: int = 1):
        super().__init__(engine)
        self.scripts: deque[str] = deque()
        self.requests: list[Request] = []  # what was asked
        self._burst, self._rng = burst, Random(0)
        engine.run_once = self._answer  # type: ignore[method-assign]

    def _answer(self) -> bool:
        row = self.engine.scheduler.queue.all()[0]
        self.engine.scheduler.queue.remove(row)
        self.requests.append(row.handle.request)
        for each in row.fork():
            self._say(each, self.scripts.popleft())
        return self.engine.scheduler.busy

    def _say(self, row: SequenceState, script: str) -> None:
        end = min(tokenizer().eos_token_ids)
        tokens = [*tokenizer().encode(script, add_special_tokens=False), end]
        row.started = time.perf_counter()
        while not row.finished:
            if row.handle.cancelled:
                row.finish("cancelled")
                return
            count = self._rng.randint(1, self._burst)
            accepted = len(tokens[:count]) - 1
            row.emit(tokens[:count], accepted)
            tokens = tokens[count:]


@contextmanager
def scripted(*scripts: str, burst: int = 1, **server: Any) -> Iterator[tuple[Running, ScriptedRoom]]:
    """A server that answers its first requests with these. More can be added to the room's scripts."""
    with running(room_type=ScriptedRoom, burst=burst, **server) as here:
        assert isinstance(here.room, ScriptedRoom)
        here.room.scripts.extend(scripts)
        yield here, here.room
