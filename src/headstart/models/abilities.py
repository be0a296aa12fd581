"""What the engine may ask of a model: those that mlx-lm runs can do less (`wrapped.py`)."""

from functools import cached_property
from typing import Any, NoReturn

import mlx.core as mx

from ..errors import RequestError
from ..kernels import Backend

WINDOW = 16  # known tokens that are decoded at a time


class Abilities:
    config: dict[str, Any]  # config.json's text part
    dtype: mx.Dtype
    backend: Backend

    @property
    def vocabulary(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def context_length(self) -> int:
        return int(self.config["max_position_embeddings"])

    @property
    def hidden_size(self) -> int:
        """Return the size of what `trunk` gives for a token."""
        return int(self.config["hidden_size"])

    @property
    def most_sequences(self) -> int | None:
        """Return how many sequences can run at a time, None for any number."""
        return None

    @property
    def keeps_prefixes(self) -> bool:
        """Return whether the prefix cache can hold its states."""
        return True

    @property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """Return widths and numbers of sequences that show whether rows are independent."""
        return self.backend.windows

    @property
    def known_window(self) -> int:
        """Return how many known tokens at a time are decoded again."""
        return WINDOW

    @cached_property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("mlx.core.")

    # mlx-lm's way to run a model

    def make_cache(self, *args: object, **named: object) -> NoReturn:
        """Refuse to be run by mlx-lm's functions."""
        raise RequestError(
            "mlx_lm cannot run this model: use headstart.generate, stream_generate, batch_generate and "
            "make_prompt_cache, which take the same arguments"
        )

    __call__ = make_cache
