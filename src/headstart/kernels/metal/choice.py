"""Check kernels on the user's machine, time them beside stock ops, and choose one for each shape of weights.

One implementation serves every number of rows from 1 to 16: choosing by the number of rows would change a sequence's
bits when it drafts. Decisions are kept in a file, by chip, macOS, MLX, our sources and shape.
"""

import hashlib
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

MOST_ROWS = 16
WIDTHS = (1, 2, 4, 8, 16)  # that are checked
TIMED = (1, 2, 4)  # a plain step, and windows of one and of three drafts
REPEATS = 7
TOLERANCE = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 1e-4}

Run = Callable[[mx.array], mx.array]  # [rows, ...] → [rows, ...]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Decision:
    """What computes an operation, and why."""

    chosen: str
    exact: bool  # a row has the same bits among any number of rows
    refused: dict[str, str] = field(default_factory=dict)  # by candidate
    seconds: dict[str, list[float]] = field(default_factory=dict)  # by candidate, at TIMED rows


def decide(candidates: Mapping[str, Run], rows: mx.array, clock: Clock = time.perf_counter) -> Decision:
    """Return the fastest candidate whose rows are independent; `stock`, the oracle, where there is none.

    Args:
        candidates: what may compute the operation, `stock` among them.
        rows: MOST_ROWS random rows to compute it for.
    """
    expected = candidates["stock"](rows)
    mx.eval(expected)
    refused: dict[str, str] = {}
    usable: dict[str, Run] = {}
    exact = {}
    for name, run in candidates.items():
        try:
            reason = None if name == "stock" else _disagreement(run, rows, expected)
            exact[name] = reason is None and _is_independent(run, rows)
        except Exception as error:  # of the device's compiler, whose classes differ
            reason = f"failed: {str(error).splitlines()[0][:200]}" if str(error) else type(error).__name__
        if reason is not None:
            refused[name] = reason
        else:
            usable[name] = run
    seconds = _time(usable, rows, clock)
    best = min((name for name in usable if exact[name]), key=lambda name: sum(seconds[name]), default="stock")
    return Decision(best, exact.get(best, False), refused, seconds)


def _disagreement(run: Run, rows: mx.array, expected: mx.array) -> str | None:
    found, wanted = run(rows).astype(mx.float32), expected.astype(mx.float32)
    if found.shape != wanted.shape:
        return f"its shape is {found.shape}, not {wanted.shape}"
    error = float(mx.linalg.norm(found - wanted) / mx.maximum(mx.linalg.norm(wanted), 1e-30))
    allowed = TOLERANCE[str(rows.dtype).removeprefix("mlx.core.")]
    return None if error <= allowed else f"differs from stock ops by {error:.1e} (at most {allowed:.0e} is rounding)"


def _is_independent(run: Run, rows: mx.array) -> bool:
    """Return whether each row has the same bits in every batch of WIDTHS rows."""
    together = run(rows)
    for width in WIDTHS:
        for start in range(0, MOST_ROWS, width):
            if not mx.array_equal(run(rows[start : start + width]), together[start : start + width]).item():
                return False
    return True


def _time(candidates: Mapping[str, Run], rows: mx.array, clock: Clock) -> dict[str, list[float]]:
    """Return the median seconds of each candidate at TIMED rows, measured in turns."""
    samples: dict[str, list[list[float]]] = {name: [[] for _ in TIMED] for name in candidates}
    for _ in range(REPEATS):
        for index, width in enumerate(TIMED):
            part = rows[:width]
            mx.eval(part)
            for name, run in candidates.items():
                begun = clock()
                mx.eval(run(part))
                samples[name][index].append(clock() - begun)
    return {name: [statistics.median(each) for each in times] for name, times in samples.items()}


@cache
def identity() -> str:
    """Return what a decision is valid for: chip, macOS, MLX, and the source of our kernels."""
    info = mx.device_info() if hasattr(mx, "device_info") else mx.metal.device_info()
    sources = sorted(Path(__file__).parent.glob("*.metal")) + sorted(Path(__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    name = info.get("device_name", info.get("architecture", "unknown"))
    return f"{name}, macOS {platform.mac_ver()[0]}, mlx {version('mlx')}, kernels {digest}"


class Choices:
    """The decisions of this machine, kept in a file. A file that cannot be read or written only costs time."""

    def __init__(self, path: Path, identity: str):
        self.path, self.identity = path, identity
        self.decisions: dict[str, Decision] = self._read()

    def _read(self) -> dict[str, Decision]:
        try:
            stored: Any = json.loads(self.path.read_text())
            if stored["identity"] != self.identity:
                return {}
            return {key: Decision(**value) for key, value in stored["decisions"].items()}
        except (OSError, ValueError, TypeError, KeyError):
            return {}

    def save(self) -> None:
        stored = {"identity": self.identity, "decisions": {key: asdict(d) for key, d in self.decisions.items()}}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.path.with_suffix(".new")
            temporary.write_text(json.dumps(stored, indent=1))
            temporary.replace(self.path)
        except OSError:
            return

    def tune(
        self,
        operations: Sequence[tuple[str, Callable[[], tuple[Mapping[str, Run], mx.array]]]],
        progress: Callable[[int, int, str], None] = lambda done, total, key: None,
        clock: Clock = time.perf_counter,
    ) -> None:
        """Decide what was not decided before. `operations` are keys, and functions that make candidates and rows."""
        missing = [(key, make) for key, make in operations if key not in self.decisions]
        for index, (key, make) in enumerate(missing):
            progress(index, len(missing), key)
            candidates, rows = make()
            self.decisions[key] = decide(candidates, rows, clock)
        if missing:
            progress(len(missing), len(missing), "")
            self.save()

    def chosen(self, key: str) -> str:
        """Return what computes an operation: stock ops where nothing was checked."""
        decision = self.decisions.get(key)
        return decision.chosen if decision is not None else "stock"
