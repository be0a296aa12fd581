"""What one machine holds of a trunk that several hold together, as far as the forward must know."""

from typing import Protocol

import mlx.core as mx


class Share(Protocol):
    """Layers may be divided between machines, or every layer between all of them. `cluster` has both."""

    @property
    def ranks(self) -> int: ...  # machines

    @property
    def ends(self) -> bool: ...  # the trunk's last layer is here

    def take(self, x: mx.array) -> mx.array:
        """Return what the first layer here is given [B, W, H]; `x` is the embedding."""
        ...

    def whole(self, part: mx.array) -> mx.array:
        """Return what a layer makes [B, W, H], of which this machine has made a `part`."""
        ...

    def give(self, x: mx.array) -> mx.array:
        """Return the trunk's output [B, W, H]; `x` is what the last layer here made."""
        ...

    def everywhere(self, here: bool) -> bool:
        """Return whether all machines have true `here`. They must all call it."""
        ...


class Alone:
    """All of it is here."""

    ranks, ends = 1, True

    def take(self, x: mx.array) -> mx.array:
        return x

    def whole(self, part: mx.array) -> mx.array:
        return part

    def give(self, x: mx.array) -> mx.array:
        return x

    def everywhere(self, here: bool) -> bool:
        return here
