"""What was found out about kernels on the user's machine when a model was loaded."""

from dataclasses import dataclass, field

FAULTS = ("failed", "differs", "crashed")  # how reasons begin that are no matter of shape or type


@dataclass(frozen=True)
class Candidate:
    """What may compute an operation, and what was found about it."""

    name: str
    refused: str | None = None  # why it may not
    exact: bool | None = None  # a row has the same bits among any number of rows; None where that was not looked at
    error: float | None = None  # relative distance from stock ops
    seconds: dict[int, float] = field(default_factory=dict)  # by rows
    first: float | None = None  # seconds of the first runs, which compile


@dataclass(frozen=True)
class KernelCheck:
    """What computes an operation, and why."""

    operation: str
    shape: str
    chosen: str
    exact: bool  # of what was chosen
    candidates: tuple[Candidate, ...]
    forms: int = 1  # of what was chosen, that were looked at
    kept: bool = False  # from an earlier process

    @property
    def excluded(self) -> list[str]:
        """Return what may not compute this because it failed, each with the reason."""
        bad = [each for each in self.candidates if (each.refused or "").startswith(FAULTS)]
        return [f"{self.operation} {self.shape}: {each.name} {each.refused}" for each in bad]
