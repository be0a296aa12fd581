"""The prefix cache of several machines: all keep the same, though each has only looked at its own part."""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest

from headstart.cluster import SharedPrefix
from headstart.state import CHUNK, KV, BatchState, Chunks
from headstart.state.prefix import Sizes
from headstart.state.snapshot import take_snapshot


@dataclass
class Communicator:
    """What the others have found."""

    others: bool
    asked: list[bool] = field(default_factory=list)

    def everywhere(self, here: bool) -> bool:
        self.asked.append(here)
        return here and self.others


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize("others", [True, False])
def test_what_is_not_finite_on_one_machine_is_kept_by_none(here: bool, others: bool) -> None:
    comm: Any = Communicator(others)
    prefix = SharedPrefix(10**9)
    prefix.agree(comm, 10**9, Sizes(2, 100))
    keys = mx.full((1, 1, CHUNK, 32), 1.0 if here else mx.nan)
    length = mx.array([CHUNK], mx.int32)
    rows = BatchState([KV(keys, keys, mx.zeros((1,), mx.int32))], length, mx.zeros((1,), mx.int32), [CHUNK])
    prefix.store(Chunks.of(range(CHUNK + 1), [CHUNK]), 1, [(rows, 0)], take_snapshot(rows, mx.zeros((1, 1, 16))))
    assert comm.asked == [here]
    assert prefix.stats().entries == (here and others)
