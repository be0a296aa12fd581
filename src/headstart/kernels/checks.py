"""What was found out about kernels on the user's machine when a model was loaded."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Candidate:
    """What may compute an operation, and what was found about it."""

    name: str
    refused: str | None = None  # why it may not
    exact: bool = False  # a row has the same bits among any number of rows
    error: float | None = None  # relative distance from stock ops
    seconds: dict[int, float] = field(default_factory=dict)  # by rows


@dataclass(frozen=True)
class KernelCheck:
    """What computes an operation, and why."""

    operation: str
    shape: str
    chosen: str
    exact: bool  # of what was chosen
    candidates: tuple[Candidate, ...]
