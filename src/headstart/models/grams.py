"""Embeddings of hashed n-grams: which rows of a table a token has, by itself and the few before it.

A table has so many heads for every order of n-grams, and each head has rows of its own: a prime number of them, the
next one not below what config.json says. The rows of a token are read from disk when they are needed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import isqrt
from typing import Any

import mlx.core as mx
import numpy as np

from ..kernels.layers import Layer
from ..kernels.recurrent import gram_history
from ..state import BatchState

MASK = (1 << 64) - 1
GAMMA, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of splitmix64
SAMPLE = 1024  # rows
APART = 10007  # between the seeds of two tables
Read = Callable[[np.ndarray], mx.array]  # row numbers [...] → rows [..., D]


@dataclass(frozen=True)
class GramShape:
    """The sizes of one table, and how its rows are found."""

    number: int  # of the tables of a model
    orders: int  # tokens of the longest n-gram
    heads: int  # of every order but the first
    size: int  # numbers of a token's rows together
    end: int  # the token that ends texts: nothing before it counts
    seed: int
    vocabulary: int
    least: int  # rows of a head
    multiple: int  # of which the rows of a table are one

    @classmethod
    def of(cls, text: dict[str, Any], number: int) -> "GramShape":
        end = text.get("eos_token_id")
        shape = cls(
            number=number,
            orders=int(text.get("ngram_size", 3)),
            heads=int(text.get("heads_per_ngram", 8)),
            size=int(text.get("ple_embed_dim") or text["hidden_size"]),
            end=int(end[0] if isinstance(end, list) else end),  # type: ignore[arg-type]
            seed=int(text.get("seed", 1234)),
            vocabulary=int(text["vocab_size"]),
            least=int(text.get("ngram_vocab_size_base", 20_000_000)),
            multiple=int(text.get("make_ngram_vocab_size_divisible_by", 128)),
        )
        if shape.orders < 2 or shape.heads < 1 or shape.size % shape.columns:
            raise ValueError(f"ple_embed_dim {shape.size} does not divide among {shape.columns} heads")
        return shape

    @property
    def columns(self) -> int:
        """Return how many rows a token has."""
        return (self.orders - 1) * self.heads

    @property
    def width(self) -> int:
        """Return the numbers of a row."""
        return self.size // self.columns

    @property
    def head_rows(self) -> tuple[int, ...]:
        """Return how many rows each head has."""
        first = self.number * self.columns
        return primes_from(self.least, first + self.columns)[first:]

    @property
    def rows(self) -> int:
        """Return how many rows there are, with those that fill it up."""
        return -(-sum(self.head_rows) // self.multiple) * self.multiple

    @property
    def offsets(self) -> np.ndarray:
        """Return where the rows of each head begin."""
        return np.cumsum([0, *self.head_rows[:-1]], dtype=np.int64)

    @property
    def multipliers(self) -> np.ndarray:
        half = max(1, ((1 << 63) - 1) // max(self.vocabulary, 1) // 2)
        first = self.seed + APART * self.number
        mixed = (_splitmix64((first + GAMMA * (index + 1)) & MASK) for index in range(self.orders))
        return np.array([2 * (each % half) + 1 for each in mixed], np.int64)

    def rows_of(self, tokens: np.ndarray) -> np.ndarray:
        """Return the rows [B, W, columns] of the tokens [B, orders - 1 + W] that have as many others before them."""
        before = self.orders - 1
        tokens = tokens.astype(np.int64)
        width, multipliers, sizes = tokens.shape[1] - before, self.multipliers, np.array(self.head_rows, np.int64)
        mixed, found = tokens[:, before:] * multipliers[0], []
        ended = np.zeros(mixed.shape, bool)  # whether a text has ended between the token and the last of the n-gram
        for back in range(1, self.orders):
            token = np.where(ended, self.end, tokens[:, before - back : before - back + width])
            ended |= token == self.end
            mixed = mixed ^ (token * multipliers[back])
            found.append(mixed[..., None] % sizes[(back - 1) * self.heads : back * self.heads])
        return np.concatenate(found, axis=-1) + self.offsets


@dataclass(frozen=True, eq=False)
class GramTable:
    """A table: its shape, and what reads rows of it."""

    shape: GramShape
    read: Read

    def sample(self) -> mx.array:
        """Return rows from all over the table, which tell it from others."""
        return self.read(np.linspace(0, self.shape.rows - 1, SAMPLE).astype(np.int64))

    def __call__(self, tokens: np.ndarray) -> mx.array:
        """Return the embeddings [B, W, size] of the tokens [B, orders - 1 + W] that have others before them."""
        rows = self.shape.rows_of(tokens)
        return self.read(rows).reshape(*rows.shape[:2], self.shape.size)


def read_tables(
    tables: Sequence[GramTable], layers: Sequence[Layer], tokens: mx.array, state: BatchState
) -> list[mx.array]:
    """Return what each table has of the tokens [B, W] after what the `layers` hold in `state`, [B, W, E].

    The host must know the tokens to read it, so this waits for those that are drafts.
    """
    known = np.array(mx.concatenate([gram_history(layers, state), tokens], axis=1))
    return [table(known) for table in tables]


def _splitmix64(value: int) -> int:
    value = (value + GAMMA) & MASK
    value = ((value ^ (value >> 30)) * FIRST) & MASK
    value = ((value ^ (value >> 27)) * SECOND) & MASK
    return value ^ (value >> 31)


@cache
def primes_from(least: int, count: int) -> tuple[int, ...]:
    """Return the first `count` primes that are not below `least`."""
    found: list[int] = []
    number = max(least, 2)
    while len(found) < count:
        if all(number % divisor for divisor in range(2, isqrt(number) + 1)):
            found.append(number)
        number += 1
    return tuple(found)
