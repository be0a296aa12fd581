"""Prefix cache: the state that prompts leave behind, so that a prompt with the same beginning resumes after it.

A tree of chunks. A node is one chunk of a prompt after those of its ancestors, and holds the KV cache of that chunk
alone, so prompts share what they have in common. A prompt follows the tree by its own chunks: what it finds was
computed in the steps in which it would compute it itself. Resuming after a chunk takes more: the recurrent states and
the last hidden state at its end, a `Snapshot`. Those of a large hybrid model are several times the size of the
chunk's KV cache, so they are kept only at some nodes (`Retention`) and at every leaf: a chunk that no prompt can
resume from is useless.

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

from ..errors import RequestError, check_type
from .disk_prefix import DiskPrefix
from .snapshot import PackedArray, Snapshot, States, cut_kv, kv_between, restore

CHUNK = 512  # tokens; prompts are prefilled in steps of at most so many, and can be resumed between them
TAIL = 32  # last tokens of a prompt, which a chat template may write differently in the next turn


class Retention(IntEnum):
    """How long a node keeps its snapshot once it has children."""

    PASSING = 0  # until the prompt has gone further
    SPARE = 1  # while there is room: a prompt ended here, or it is the first after 2^n full chunks
    FORK = 2  # as long as there are other prompts to evict: prompts have diverged here, and others may


@dataclass(frozen=True)
class PrefixStats:
    hits: int = 0  # prompts that were resumed
    misses: int = 0  # prompts of more than one chunk that were not
    tokens: int = 0  # prompt tokens that were not computed again
    entries: int = 0  # chunks
    bytes: int = 0
    max_bytes: int = 0
    evictions: int = 0
    disk_tokens: int = 0  # tokens of the prompts that were read from the disk


class Sizes(NamedTuple):
    """Bytes to count, where machines share a model: their own sizes differ, and they must evict the same."""

    position: int  # of a token's keys and values
    states: int


class Chunks(NamedTuple):
    """A prompt in the chunks in which it is prefilled, and by which it is found."""

    length: int  # tokens of the prompt; those after the last chunk are not cached
    ends: list[int]  # of the chunks, less than `length`
    tokens: list[bytes]  # of the chunks

    @classmethod
    def of(cls, tokens: Sequence[int], ends: list[int], adapter: str | None = None) -> "Chunks":
        """`tokens` tell prompts apart. They may differ from the ids that are run, where these do not say it all. So
        does the `adapter`, which decides every state: it is part of the first chunk."""
        starts = [0, *ends[:-1]]
        chunks = [array("q", tokens[a:b]).tobytes() for a, b in zip(starts, ends, strict=False)]
        if adapter is not None and chunks:
            chunks[0] += adapter.encode().ljust(65)  # 8 bytes are a token, so no other chunk has this length
        return cls(len(tokens), ends, chunks)

    def start(self, index: int) -> int:
        return self.ends[index - 1] if index else 0


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
        if self.sizes:
            return self.sizes.position * (len(self.chunk) // 8)
        return sum(part.nbytes for pack in self.packs for part in pack)

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

    def __init__(
        self, max_bytes: int, *, eight_bits: bool = False, disk: DiskPrefix | None = None, chunk: int = CHUNK
    ):
        """Create a cache of at most `max_bytes`. With `eight_bits` keys and values take about half of the bytes, and
        a hit is no longer exact. `disk` also keeps what memory has no room for, and survives the process."""
        check_type(max_bytes, (int, float), "max_bytes", "give a number of bytes")
        if not max_bytes >= 0:  # also of what is no number
            raise RequestError(f"the prefix cache's max_bytes is {max_bytes}; it must be 0 or more")
        self.max_bytes = max_bytes
        self.eight_bits = eight_bits
        self.disk = disk
        self.chunk = chunk
        self.sizes: Sizes | None = None  # bytes to count instead of the actual ones
        self._lock = Lock()
        self._root = Node(None, b"", [])
        self._clock = 0
        self._hits = self._misses = self._tokens = self._evictions = self._disk_tokens = 0

    def resume(self, prompt: Chunks, states: States) -> tuple[int, mx.array] | None:
        """Fill the states of a new sequence with the longest known prefix of its prompt.

        Returns its length, less than the prompt's, and the hidden states [1, T, H] of its last tokens: the pairs that
        they make with the tokens after them are the first that the head has still to see.
        """
        if not prompt.ends:
            return None
        if self.disk is not None:
            self._load(prompt, self.disk)
        with self._lock:
            path = self._walk(prompt.tokens)
            if path and path[-1].children:  # this prompt ends here or diverges, so others may too
                path[-1].retention = Retention.FORK
            while path and path[-1].states is None:
                path.pop()
            if not path:
                self._misses += 1
                return None
            length, after = prompt.ends[len(path) - 1], path[-1].states
            assert after is not None
            self._hits += 1
            self._tokens += length
            restore([node.packs for node in path], after, states, length)
            return length, mx.contiguous(after.hidden)

    def fork(self, prompt: Chunks) -> int:
        """Return how many tokens a prompt shares with others that went on otherwise, if none can be resumed there
        yet; else 0."""
        with self._lock:
            path = self._walk(prompt.tokens)
            forks = path and path[-1].retention is Retention.FORK and path[-1].states is None
            return prompt.ends[len(path) - 1] if forks else 0

    def store(self, prompt: Chunks, count: int, states: States, after: Snapshot) -> None:
        """Store the states of a sequence that has prefilled the first `count` chunks of its prompt, and what was
        `after` them.

        They must have been evaluated: otherwise a failure that is still to come would be stored too.
        """
        with self._lock:
            path = self._walk(prompt.tokens[:count])
            retention = self._retention(prompt, len(path), count - 1, after)
            if len(path) == count:
                path[-1].retention = retention = max(retention, path[-1].retention)
                if path[-1].states is not None or retention is Retention.PASSING:
                    return
            # Chunks before the last may be missing too, if they were evicted since the sequence stored them.
            missing = range(len(path), count)
            packs = [cut_kv(states, prompt.start(i), prompt.ends[i], self.eight_bits) for i in missing]
            arrays = [*after.arrays(), *(part for node in packs for pack in node for part in pack)]
            nbytes = sum(a.nbytes for a in arrays)
            if self.sizes is not None:
                length = prompt.ends[count - 1] - prompt.start(len(path)) if missing else 0
                nbytes = length * self.sizes.position + self.sizes.states
            if not self._make_room(nbytes, path):
                return
            mx.eval(arrays)  # a slice that is not evaluated would keep the sequence's whole state alive
            computed = kv_between(states, prompt.start(missing.start), prompt.ends[count - 1]) if missing else []
            if not self._are_finite([*after.arrays(), *computed]):  # at once: a card has hundreds of pieces
                return  # the model broke down: other prompts must not inherit it
            self._add(prompt, path, packs, after, retention)
            if self.disk is not None and retention is not Retention.PASSING:
                kept = [node.packs for node in path]
                self.disk.save(self.disk.names(prompt.tokens[:count]), [*kept, *packs], after)

    def _load(self, prompt: Chunks, disk: DiskPrefix) -> None:
        """Add what the disk holds of a prompt, if it can be resumed later there than in memory.

        Files are read without the lock: only the engine's thread adds nodes, but another may clear the cache.
        """
        with self._lock:
            path = self._walk(prompt.tokens)
        resumable = max((n for n, node in enumerate(path, 1) if node.states is not None), default=0)
        names = disk.names(prompt.tokens)
        for count in disk.longest(names, len(path)):
            if count <= resumable:
                return
            known = min(len(path), count)
            if (found := disk.load(names, known, count)) is None:
                continue
            packs, after = found
            with self._lock:
                nbytes = after.nbytes + sum(a.nbytes for node in packs for pack in node for a in pack)
                path = self._walk(prompt.tokens[:count])
                if len(path) == known and self._make_room(nbytes, path):
                    self._add(prompt, path, packs, after, Retention.SPARE)
                    self._disk_tokens += prompt.ends[count - 1] - (prompt.ends[resumable - 1] if resumable else 0)
            return

    def _add(
        self, prompt: Chunks, path: list[Node], packs: list[list[PackedArray]], after: Snapshot, retention: Retention
    ) -> None:
        """Add nodes for the chunks after `path`, and a snapshot at the last."""
        node = path[-1] if path else self._root
        if packs and node.retention is Retention.PASSING:
            node.states = None
        for chunk, new in zip(prompt.tokens[len(path) :], packs, strict=False):
            child = Node(node, chunk, new, self.sizes, used=self._clock)
            node.children[chunk] = child
            node = child
        node.states, node.retention = after, max(retention, node.retention)

    def clear(self) -> None:
        """Remove everything from memory. Sequences that were resumed keep their state."""
        with self._lock:
            for node in list(self._nodes()):  # break the cycles of parents and children, or memory is freed late
                node.parent, node.children = None, {}
            self._root = Node(None, b"", [])

    def close(self) -> None:
        """Write what the disk is still to get."""
        if self.disk is not None:
            self.disk.close()

    def stats(self) -> PrefixStats:
        with self._lock:
            sizes = [node.nbytes for node in self._nodes()]
            return PrefixStats(
                self._hits,
                self._misses,
                self._tokens,
                len(sizes),
                sum(sizes),
                self.max_bytes,
                self._evictions,
                self._disk_tokens,
            )

    def _are_finite(self, arrays: list[mx.array]) -> bool:
        return bool(mx.stack([mx.isfinite(a).all() for a in arrays]).all().item())

    def _walk(self, chunks: Sequence[bytes]) -> list[Node]:
        """Return the known ones of these chunks, from the first on, and mark them as used."""
        self._clock += 1
        path, node = [], self._root
        for chunk in chunks:
            found = node.children.get(chunk)
            if found is None:
                break
            node = found
            node.used = self._clock
            path.append(node)
        return path

    def _retention(self, prompt: Chunks, known: int, index: int, after: Snapshot) -> Retention:
        """Return how long to keep the snapshot at the end of a chunk, if chunks before it are `known`.

        The next turn of a chat resumes at the last boundary of this prompt, or at the one before it if its template
        changes the text between. Powers of two halve what is computed again by a prompt that diverges elsewhere.
        """
        full, before = (end // self.chunk for end in (prompt.ends[index], prompt.start(min(known, index))))
        following = prompt.ends[index + 1] if index + 1 < len(prompt.ends) else prompt.length
        large = self.sizes.states if self.sizes else after.recurrent
        spare = following > prompt.length - TAIL or full.bit_length() > before.bit_length() or not large
        return Retention.SPARE if spare else Retention.PASSING

    def _make_room(self, nbytes: int, path: list[Node]) -> bool:
        """Evict the least recently used until `nbytes` fit after `path`. If they cannot fit, evict nothing and return
        False."""
        stays = sum(node.packs_nbytes for node in path) + sum(node.states_nbytes for node in path[-1:])
        if stays + nbytes > self.max_bytes:
            return False
        used = sum(node.nbytes for node in self._nodes())
        while used + nbytes > self.max_bytes:
            used -= self._evict(path[-1:])
        return True

    def _evict(self, needed: list[Node]) -> int:
        """Evict a snapshot within a prompt, or else a leaf, or else a fork's snapshot. Return the bytes freed."""
        self._evictions += 1
        nodes = [node for node in self._nodes() if node not in needed]
        within = [node for node in nodes if node.children and node.states is not None]
        leaves = [node for node in nodes if not node.children]
        spare = [node for node in within if node.retention is not Retention.FORK]
        if spare or not leaves:
            node = min(spare or within, key=lambda node: node.used)
            freed, node.states = node.states_nbytes, None
            return freed
        leaf = min(leaves, key=lambda node: node.used)
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
