"""The prefix cache of a model that several machines share: all of them keep and let go of the same."""

from collections.abc import Callable, Sequence

import mlx.core as mx

from ..errors import ClusterError
from ..state import Prefix, Rows
from ..state.prefix import Sizes


class SharedPrefix(Prefix):
    """Every machine has the layers' memory that it has made itself, and counts it as the one with the most does.

    What is kept follows from the prompts, which are the same everywhere. Only the wish to `clear` it comes from
    outside: `on_clear` carries it to all.
    """

    on_clear: Callable[[], None]

    def agree(self, max_bytes: int, sizes: Sizes) -> None:
        self.max_bytes, self.sizes = max_bytes, sizes

    def store(self, prompt: Sequence[int], end: int, rows: Rows, head: Rows | None, hidden: mx.array) -> None:
        try:
            super().store(prompt, end, rows, head, hidden)
        except Exception as error:  # of memory: the others have stored it
            raise ClusterError("one of several machines cannot keep the beginning of a prompt") from error

    def clear(self) -> None:
        self.on_clear()

    def clear_here(self) -> None:
        super().clear()
