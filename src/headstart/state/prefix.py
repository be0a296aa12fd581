"""What prompts have left behind, so that the next one that begins the same way need not be read again.

A tree of chunks: a node is one chunk of a prompt behind those of its ancestors, and holds the keys and values of that
chunk alone, so prompts share what they have in common. To go on after a chunk takes more: the recurrent states and
the last hidden as they were there. Those of a large hybrid model are several times the size of the chunk's keys and
values, so they are kept only at some nodes (`Worth`), and at every leaf: a chunk nobody can go on from serves nobody.

Only rows that are still taking in their prompt are stored. They have no drafts, so nothing here was ever in doubt,
and a hit repeats the computation of a miss bit for bit.
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
from .snapshot import Pack, States, cut, join, pack, states

CHUNK = 512  # tokens; prompts are taken in at fixed multiples, and can be resumed there
TAIL = 32  # last tokens of a prompt that a chat's template may write otherwise in the next turn


class Worth(IntEnum):
    """How long a node's states stay once there are nodes behind it."""

    PASSING = 0  # until the prompt has gone further
    SPARE = 1  # while there is room: a prompt ended here, or it is a power of two of chunks
    FORK = 2  # as long as the node: prompts have parted here, and others may


@dataclass(frozen=True)
class PrefixStats:
    hits: int = 0  # prompts that were resumed
    misses: int = 0  # prompts of more than a chunk that were not
    tokens: int = 0  # that did not have to be read
    entries: int = 0  # chunks
    bytes: int = 0
    max_bytes: int = 0
    evictions: int = 0  # times that something had to go


class Sizes(NamedTuple):
    """In bytes, as all machines count that share a model: theirs differ, and they must let go of the same."""

    packs: int  # of a chunk
    states: int


@dataclass(eq=False)
class Node:
    parent: "Node | None"
    chunk: bytes  # its tokens, compared as they are
    packs: list[Pack]  # keys and values of the trunk's layers, then of the head's
    sizes: Sizes | None = None
    states: States | None = None  # after the chunk, where one can go on from there
    worth: Worth = Worth.PASSING
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


class Prefix:
    """The prefix cache of one model. The engine's thread uses it; `stats` and `clear` may be called from any."""

    def __init__(self, max_bytes: int, *, eight_bits: bool = False, chunk: int = CHUNK):
        """`eight_bits`: keys and values take about half the room, and a hit is no longer exact."""
        if max_bytes < 0:
            raise RequestError(f"the prefix cache's max_bytes is {max_bytes}; it must be 0 or more")
        self.max_bytes = max_bytes
        self.eight_bits = eight_bits
        self.chunk = chunk
        self.sizes: Sizes | None = None  # what counts, where that is not what there is
        self._lock = Lock()
        self._root = Node(None, b"", [])
        self._clock = 0
        self._hits = self._misses = self._tokens = self._evictions = 0

    def resume(self, prompt: Sequence[int], rows: BatchState, head: BatchState | None) -> tuple[int, mx.array] | None:
        """Fill the memory of a new row with the longest known beginning of its prompt.

        Returns how many tokens that is, at least one less than the prompt has, and the hidden [1, 1, H] of the last
        of them: the pair it makes with the prompt's next token is the first that the head has not seen.
        """
        if len(prompt) <= self.chunk:
            return None
        with self._lock:
            path = self._walk(prompt, len(prompt) - 1)
            if path and path[-1].children:  # this prompt ends here or goes another way, so others may too
                path[-1].worth = Worth.FORK
            while path and path[-1].states is None:
                path.pop()
            if not path:
                self._misses += 1
                return None
            taken, after = len(path) * self.chunk, path[-1].states
            assert after is not None
            self._hits, self._tokens = self._hits + 1, self._tokens + taken
            join([node.packs for node in path], after, rows, head, taken)
            return taken, mx.contiguous(after.hidden)

    def store(
        self, prompt: Sequence[int], end: int, rows: BatchState, head: BatchState | None, hidden: mx.array
    ) -> None:
        """Keep what a row holds that has taken in `prompt[:end]`, a multiple of the chunk, and not a token more.

        It must have been computed: a failure that is still to come would be kept too, and handed to others.
        """
        assert end % self.chunk == 0
        with self._lock:
            path = self._walk(prompt, end)
            after = states(rows, hidden)
            known, worth = len(path) * self.chunk, self._worth(prompt, end, after)
            if known == end:
                path[-1].worth = worth = max(worth, path[-1].worth)
                if path[-1].states is not None or worth is Worth.PASSING:
                    return
            # Chunks before the last may be missing too, if they were let go while the row went on.
            packs = [
                [pack(part, self.eight_bits) for part in cut(rows, head, start, start + self.chunk)]
                for start in range(known, end, self.chunk)
            ]
            arrays = [*after.arrays(), *(part for node in packs for pack in node for part in pack)]
            nbytes = sum(a.nbytes for a in arrays)
            if self.sizes is not None:
                nbytes = len(packs) * self.sizes.packs + self.sizes.states
            if not self._make_room(nbytes, path):
                return
            mx.eval(arrays)  # a slice that waits would keep the whole row's memory alive
            if not self._are_finite(arrays):
                return  # something broke down, and others need not inherit it
            node = path[-1] if path else self._root
            if packs and node.worth is Worth.PASSING:
                node.states = None
            for start, new in zip(range(known, end, self.chunk), packs, strict=True):
                child = Node(node, self._key(prompt, start), new, self.sizes, used=self._clock)
                node.children[child.chunk] = child
                node = child
            node.states, node.worth = after, worth

    def clear(self) -> None:
        """Forget everything. Rows that were resumed keep what they have."""
        with self._lock:
            for node in list(self._nodes()):  # a circle of parents and children would hold the memory for a while
                node.parent, node.children = None, {}
            self._root = Node(None, b"", [])

    def stats(self) -> PrefixStats:
        with self._lock:
            nodes = list(self._nodes())
            return PrefixStats(
                self._hits,
                self._misses,
                self._tokens,
                len(nodes),
                sum(node.nbytes for node in nodes),
                self.max_bytes,
                self._evictions,
            )

    def _are_finite(self, arrays: list[mx.array]) -> bool:
        return bool(mx.stack([mx.isfinite(a).all() for a in arrays]).all().item())

    def _walk(self, prompt: Sequence[int], end: int) -> list[Node]:
        """The chunks of `prompt[:end]` that are known, from the first on, which count as used."""
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
        return array("i", prompt[start : start + self.chunk]).tobytes()

    def _worth(self, prompt: Sequence[int], end: int, after: States) -> Worth:
        """The last boundary of a prompt is where its next turn goes on, or the one before it if the turn may change
        the text between. The powers of two halve what is lost where a prompt parts at a place not seen before."""
        chunks, large = end // self.chunk, self.sizes.states if self.sizes else after.recurrent
        spare = end + self.chunk > len(prompt) - TAIL or chunks & (chunks - 1) == 0 or not large
        return Worth.SPARE if spare else Worth.PASSING

    def _make_room(self, nbytes: int, path: list[Node]) -> bool:
        """Let go of what was least recently used until `nbytes` fit behind `path`. False, and nothing is lost, where
        they never will."""
        last = path[-1:]
        stays = sum(n.nbytes if n in last or n.worth is Worth.FORK else n.packs_nbytes for n in path)
        if stays + nbytes > self.max_bytes:
            return False
        used = sum(node.nbytes for node in self._nodes())
        while used + nbytes > self.max_bytes:
            used -= self._evict(last)
        return True

    def _evict(self, needed: list[Node]) -> int:
        """States within a prompt first, then leaves: children before their parents. Returns the bytes let go."""
        self._evictions += 1
        nodes = [node for node in self._nodes() if node not in needed]
        within = [n for n in nodes if n.children and n.states is not None and n.worth is not Worth.FORK]
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
            if leaf.states is not None:  # it can be resumed from: a leaf in its own right
                break
        return freed

    def _nodes(self) -> Iterator[Node]:
        """All, parents before their children."""
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()
