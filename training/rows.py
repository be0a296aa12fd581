"""Documents → rows of one length to train on, a new order in every pass over them."""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .tokens import Documents

SNAPPED = 0.25  # of the rows of code begin where a file does, as prompts do


@dataclass
class Rows:
    """Short documents (`whole`) fill rows that begin where one of them does; long ones are cut anywhere."""

    documents: Documents
    length: int
    whole: bool
    seed: int
    passes: int = 0
    taken: int = 0  # rows of this pass
    _tokens: NDArray[np.uint16] = field(init=False, repr=False)
    _begin: NDArray[np.int64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.documents.tokens) <= self.length:
            raise ValueError(
                f"the corpus has {len(self.documents.tokens)} tokens, and a row takes {self.length}: give more text"
            )
        self._shuffle()

    def take(self, count: int) -> Tensor:
        """[count, length]; the next pass begins where this one has not enough left."""
        if self.taken + count > len(self._begin):
            self.passes, self.taken = self.passes + 1, 0
            self._shuffle()
        begin = self._begin[self.taken : self.taken + count]
        if len(begin) < count:  # a corpus of fewer rows than a batch has
            begin = np.resize(begin, count)
        self.taken += count
        return torch.from_numpy(self._tokens[begin[:, None] + np.arange(self.length)].astype(np.int64))

    def resume(self, passes: int, taken: int) -> None:
        """Go on where another was."""
        self.passes, self.taken = passes, taken
        self._shuffle()

    def _shuffle(self) -> None:
        luck = np.random.default_rng((self.seed, self.passes))
        order = luck.permutation(len(self.documents.lengths))
        lengths = self.documents.lengths[order]
        ends = np.cumsum(lengths)
        starts = ends - lengths
        moved = np.repeat(self.documents.starts[order] - starts, lengths)
        self._tokens = self.documents.tokens[moved + np.arange(len(moved))]
        last = len(self._tokens) - self.length
        if self.whole:
            begin = _packed(starts, self.length, last)
        else:
            begin = np.arange(luck.integers(self.length) % (last + 1), last + 1, self.length)
            snapped = starts[np.searchsorted(starts, begin, side="right") - 1]
            begin = np.minimum(np.where(luck.random(len(begin)) < SNAPPED, snapped, begin), last)
        self._begin = luck.permutation(begin)


def _packed(starts: NDArray[np.int64], length: int, last: int) -> NDArray[np.int64]:
    """A row begins at the document that the row before had to cut."""
    begin, document = [], 0
    while document < len(starts) and starts[document] <= last:
        begin.append(starts[document])
        following = int(np.searchsorted(starts, starts[document] + length, side="right")) - 1
        document = max(following, document + 1)
    return np.array(begin, dtype=np.int64)
