"""The prefix cache of a model that several machines share: all of them keep and let go of the same."""

from collections.abc import Sequence

import mlx.core as mx

from ..errors import ClusterError
from ..state import BatchState, PrefixCache
from ..state.prefix import Sizes
from .wire import Wire


class SharedPrefix(PrefixCache):
    """Every machine has the layers' memory that it has made itself, and counts it as the one with the most does.

    What is kept follows from the prompts, which are the same everywhere. Only the wish to forget it comes from
    outside: `Leader.clear_prefix` carries it to all.
    """

    _wire: Wire

    def agree(self, wire: Wire, max_bytes: int, sizes: Sizes) -> None:
        self._wire, self.max_bytes, self.sizes = wire, max_bytes, sizes

    def store(
        self, prompt: Sequence[int], end: int, rows: BatchState, head: BatchState | None, hidden: mx.array
    ) -> None:
        try:
            super().store(prompt, end, rows, head, hidden)
        except Exception as error:  # of memory: the others have stored it
            raise ClusterError("one of several machines cannot keep the beginning of a prompt") from error

    def _are_finite(self, arrays: list[mx.array]) -> bool:
        """Everywhere: what breaks down in one machine's layers may leave those of another whole."""
        return self._wire.everywhere(super()._are_finite(arrays))
