"""Prefix cache: the state that prompts leave behind, so that a prompt with the same beginning resumes after it.

A tree of chunks. A node is one chunk of a prompt after those of its ancestors, and holds the KV cache of that chunk
alone, so prompts share what they have in common. Resuming after a chunk takes more: the recurrent states and the last
hidden state at its end, a `Snapshot`. Those of a large hybrid model are several times the size of the chunk's KV
cache, so they are kept only at some nodes (`Retention`) and at every leaf: a chunk that no prompt can resume from is
useless.

Only sequences in prefill are stored. They have no drafts, so all of their state is committed, and a hit repeats the
computation of a miss bit for bit.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from threading import Lock
from typing import NamedTuple

import mlx.core as mx

from ..errors import RequestError
from .batch_state import BatchState
from .snapshot import PackedArray, Snapshot, cut_kv, restore, take_snapshot

CHUNK = 512  # tokens; prompts are prefilled in these steps, and can be resumed there
TAIL = 32  # last tokens of a prompt, which a chat template may write differently in the next turn


class Retention(IntEnum):
    """How long a node keeps its snapshot once it has children."""

    PASSING = 0  # until the prompt has gone further
    SPARE = 1  # while there is room: a prompt ended here, or the node is 2^n chunks deep
    FORK = 2  # as long as the node: prompts have diverged here, and others may


@dataclass(frozen=True)
class PrefixStats:
    hits: int = 0  # prompts that were resumed
    misses: int = 0  # prompts of more than a chunk that were not
    tokens: int = 0  # prompt tokens that were not computed again
    entries: int = 0  # chunks
    bytes: int = 0
    max_bytes: int = 0
    evictions: int = 0


class Sizes(NamedTuple):
    """Bytes to count, where machines share a model: their own sizes differ, and they must evict the same."""

    packs: int  # of a chunk
    states: int


@dataclass(eq=False)
class Node:
    parent: "Node | None"
    chunk: bytes  # its tokens
    packs: list[PackedArray]  # keys and values of the trunk's layers, then of the head's
    sizes: Sizes | None = None
    states: Snapshot | None = None  # at the end of the chunk, if prompts can resume there
    retention: Retention = Retention.PASSING
    used: int = 0
    children: dict[bytes, "Node"] = field(default_factory=dict)

    @cached_property
    def packs_nbytes(self) -> int:
        return self.sizes.packs if self.sizes else sum(part.nbytes for pack in self.packs for part in pack)

    @property
    def states_nbytes(self) -> int:
        if self.states is None:
            return 0
        return self.sizes.states if self.sizes else self.states.nbytes

    @property
    def nbytes(self) -> int:
        return self.packs_nbytes + self.states_nbytes


class PrefixCache:
    """The prefix cache of one model. The engine's thread uses it; any thread may call `stats` and `clear`."""

    def __init__(self, max_bytes: int, *, eight_bits: bool = False, chunk: int = CHUNK):
        """Create a cache of at most `max_bytes`. With `eight_bits` keys and values take about half of the bytes, and
        a hit is no longer exact."""
        if max_bytes < 0:
            raise RequestError(f"the prefix cache's max_bytes is {max_bytes}; it must be 0 or more")
        self.max_bytes = max_bytes
        self.eight_bits = eight_bits
        self.chunk = chunk
        self.sizes: Sizes | None = None  # bytes to count instead of the actual ones
        self._lock = Lock()
        self._root = Node(None, b"", [])
        self._clock = 0
        self._hits = self._misses = self._tokens = self._evictions = 0

    def resume(
        self, prompt: Sequence[int], trunk: BatchState, head: BatchState | None
    ) -> tuple[int, mx.array] | None:
        """Fill the state of a new sequence with the longest known prefix of its prompt.

        Returns its length, less than the prompt's, and the hidden state [1, 1, H] of its last token: the pair that it
        makes with the prompt's next token is the first that the head has not seen.
        """
        if len(prompt) <= self.chunk:
            return None
        with self._lock:
            path = self._walk(prompt, len(prompt) - 1)
            if path and path[-1].children:  # this prompt ends here or diverges, so others may too
                path[-1].retention = Retention.FORK
            while path and path[-1].states is None:
                path.pop()
            if not path:
                self._misses += 1
                return None
            length, after = len(path) * self.chunk, path[-1].states
            assert after is not None
            self._hits += 1
            self._tokens += length
            restore([node.packs for node in path], after, trunk, head, length)
            return length, mx.contiguous(after.hidden)

    def store(
        self, prompt: Sequence[int], end: int, trunk: BatchState, head: BatchState | None, hidden: mx.array
    ) -> None:
        """Store the state of a sequence that has prefilled exactly `prompt[:end]`, a multiple of the chunk.

        It must have been evaluated: otherwise a failure that is still to come would be stored too.
        """
        assert end % self.chunk == 0
        with self._lock:
            path = self._walk(prompt, end)
            after = take_snapshot(trunk, hidden)
            known = len(path) * self.chunk
            retention = self._retention(prompt, end, after)
            if known == end:
                path[-1].retention = retention = max(retention, path[-1].retention)
                if path[-1].states is not None or retention is Retention.PASSING:
                    return
            # Chunks before the last may be missing too, if they were evicted since the sequence stored them.
            starts = range(known, end, self.chunk)
            packs = [cut_kv(trunk, head, start, start + self.chunk, self.eight_bits) for start in starts]
            arrays = [*after.arrays(), *(part for node in packs for pack in node for part in pack)]
            nbytes = sum(a.nbytes for a in arrays)
            if self.sizes is not None:
                nbytes = len(packs) * self.sizes.packs + self.sizes.states
            if not self._make_room(nbytes, path):
                return
            mx.eval(arrays)  # a slice that is not evaluated would keep the sequence's whole state alive
            if not self._are_finite(arrays):
                return  # the model broke down: other prompts must not inherit it
            node = path[-1] if path else self._root
            if packs and node.retention is Retention.PASSING:
                node.states = None
            for start, new in zip(starts, packs, strict=True):
                child = Node(node, self._key(prompt, start), new, self.sizes, used=self._clock)
                node.children[child.chunk] = child
                node = child
            node.states, node.retention = after, retention

    def clear(self) -> None:
        """Remove everything. Sequences that were resumed keep their state."""
        with self._lock:
            for node in list(self._nodes()):  # break the cycles of parents and children, or memory is freed late
                node.parent, node.children = None, {}
            self._root = Node(None, b"", [])

    def stats(self) -> PrefixStats:
        with self._lock:
            sizes = [node.nbytes for node in self._nodes()]
            return PrefixStats(
                self._hits, self._misses, self._tokens, len(sizes), sum(sizes), self.max_bytes, self._evictions
            )

    def _are_finite(self, arrays: list[mx.array]) -> bool:
        return bool(mx.stack([mx.isfinite(a).all() for a in arrays]).all().item())

    def _walk(self, prompt: Sequence[int], end: int) -> list[Node]:
        """Return the known chunks of `prompt[:end]` from the first on, and mark them as used."""
        self._clock += 1
        path, node = [], self._root
        for start in range(0, end - self.chunk + 1, self.chunk):
            found = node.children.get(self._key(prompt, start))
            if found is None:
                break
            node = found
            node.used = self._clock
            path.append(node)
        return path

    def _key(self, prompt: Sequence[int], start: int) -> bytes:
        return array("q", prompt[start : start + self.chunk]).tobytes()  # negative for images: see `engine/images.py`

    def _retention(self, prompt: Sequence[int], end: int, after: Snapshot) -> Retention:
        """Return how long to keep the snapshot at `end`.

        The next turn of a chat resumes at the last boundary of this prompt, or at the one before it if its template
        changes the text between. Powers of two halve what is computed again by a prompt that diverges elsewhere.
        """
        chunks = end // self.chunk
        large = self.sizes.states if self.sizes else after.recurrent
        spare = end + self.chunk > len(prompt) - TAIL or chunks & (chunks - 1) == 0 or not large
        return Retention.SPARE if spare else Retention.PASSING

    def _make_room(self, nbytes: int, path: list[Node]) -> bool:
        """Evict the least recently used until `nbytes` fit after `path`. If they cannot fit, evict nothing and return
        False."""
        last = path[-1:]
        stays = sum(n.nbytes if n in last or n.retention is Retention.FORK else n.packs_nbytes for n in path)
        if stays + nbytes > self.max_bytes:
            return False
        used = sum(node.nbytes for node in self._nodes())
        while used + nbytes > self.max_bytes:
            used -= self._evict(last)
        return True

    def _evict(self, needed: list[Node]) -> int:
        """Evict one snapshot within a prompt, or else a leaf, and return the bytes freed."""
        self._evictions += 1
        nodes = [node for node in self._nodes() if node not in needed]
        within = [n for n in nodes if n.children and n.states is not None and n.retention is not Retention.FORK]
        if within:
            node = min(within, key=lambda node: node.used)
            freed, node.states = node.states_nbytes, None
            return freed
        leaf = min((node for node in nodes if not node.children), key=lambda node: node.used)
        freed = 0
        while leaf.parent is not None and not leaf.children and leaf not in needed:
            freed += leaf.nbytes
            del leaf.parent.children[leaf.chunk]
            leaf = leaf.parent
            if leaf.states is not None:  # prompts can resume there: a leaf in its own right
                break
        return freed

    def _nodes(self) -> Iterator[Node]:
        """Yield all nodes, parents before their children."""
        pending = list(self._root.children.values())
        while pending:
            node = pending.pop()
            yield node
            pending += node.children.values()
