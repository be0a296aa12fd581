"""Messages between the devices of the machines, over `mx.distributed`."""

from dataclasses import dataclass

import mlx.core as mx


@dataclass(eq=False)
class Communicator:
    group: mx.distributed.Group
    operations: int = 0  # built so far; lazy, like all of MLX

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def ranks(self) -> int:
        return self.group.size()

    def gather(self, x: mx.array) -> mx.array:
        """Return every rank's `x` [...], stacked: [ranks, ...]."""
        self.operations += 1
        return mx.distributed.all_gather(x[None], group=self.group)

    def sum(self, x: mx.array) -> mx.array:
        """Return the sum over all ranks, with the same bits on each of them, whatever the shape.

        A ring all-reduce starts at another rank for every part of the array, so with three or more ranks the order
        of the additions, and with it the rounding, would change with the number of positions. Gathering and adding in
        one order also takes half as many hops, which dominate for a few positions.
        """
        total, *others = self.gather(x)
        for other in others:
            total = total + other
        return total

    def send(self, x: mx.array, rank: int) -> mx.array:
        """Return `x`, which is sent to `rank` once it is computed."""
        self.operations += 1
        return mx.distributed.send(x, rank, group=self.group)

    def receive(self, like: mx.array, rank: int) -> mx.array:
        """Return what `rank` sends, of the shape and type of `like`."""
        self.operations += 1
        return mx.distributed.recv_like(like, rank, group=self.group)

    def everywhere(self, here: bool) -> bool:
        """Return whether `here` is true on every rank."""
        return bool(self.gather(mx.array(int(here))).all().item())
