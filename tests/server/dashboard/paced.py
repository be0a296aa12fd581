"""Answers that come as slowly as a test wants them."""

from threading import Semaphore
from typing import Any

from scripted import ScriptedRoom

from headstart.engine.sequence import SequenceState


class PacedRoom(ScriptedRoom):
    """A scripted room in which every burst waits to be let out, once it is asked to."""

    turns: Semaphore | None = None

    def _say(self, row: SequenceState, script: str) -> None:
        emit = row.emit

        def paced(*generated: Any) -> None:
            if (turns := self.turns) is not None:
                turns.acquire(timeout=60)
            emit(*generated)

        row.emit = paced  # type: ignore[method-assign]
        super()._say(row, script)
