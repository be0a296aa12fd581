"""What the machines' devices send each other. All of it goes through here, and is counted."""

import time
from dataclasses import dataclass

import mlx.core as mx

TIMED = 8  # messages of a kind that are timed together


@dataclass(frozen=True)
class Speed:
    """What a message costs: something fixed, and something for each byte."""

    latency: float  # seconds
    bandwidth: float  # bytes a second

    def seconds(self, nbytes: int) -> float:
        return self.latency + nbytes / self.bandwidth


@dataclass(eq=False)
class Wire:
    group: mx.distributed.Group
    operations: int = 0  # described so far; the device runs them when it gets there

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def ranks(self) -> int:
        return self.group.size()

    def gather(self, x: mx.array) -> mx.array:
        """Everybody's `x` [...] → [ranks, ...]."""
        self.operations += 1
        return mx.distributed.all_gather(x[None], group=self.group)

    def sum(self, x: mx.array) -> mx.array:
        """The sum of everybody's `x`, with the same bits on all of them, whatever its shape.

        A ring's own sum begins at another machine for every part of the array, so with three or more the order, and
        with it the rounding, would change with the number of positions. To gather and add up in one order also takes
        half as many hops, which is what counts for a few positions.
        """
        total, *others = self.gather(x)
        for other in others:
            total = total + other
        return total

    def send(self, x: mx.array, rank: int) -> mx.array:
        """`x`, which is sent once it is computed."""
        self.operations += 1
        return mx.distributed.send(x, rank, group=self.group)

    def receive(self, like: mx.array, rank: int) -> mx.array:
        """What `rank` sends, of the shape and type of `like`, which need not be computed."""
        self.operations += 1
        return mx.distributed.recv_like(like, rank, group=self.group)

    def everywhere(self, here: bool) -> bool:
        """Is what is so `here` so on every machine?"""
        return bool(self.gather(mx.array(int(here))).all().item())

    def measure(self, positions: mx.array) -> Speed:
        """By a few messages of one of these `positions` [W, H] and of all of them. Everybody at the same time."""
        small, large = positions[:1], positions
        times = []
        for message in (small, small, large):  # the first is to warm up
            mx.eval(message)
            begun = time.perf_counter()
            for _ in range(TIMED):
                message = self.gather(message)[0]
            mx.eval(message)
            times.append((time.perf_counter() - begun) / TIMED)
        _, short, long = times
        more = max(long - short, 1e-9)
        return Speed(short, (large.nbytes - small.nbytes) / more)
