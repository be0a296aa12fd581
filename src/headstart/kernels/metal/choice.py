"""Check kernels on the user's machine, time them beside stock ops, and choose one for each shape of weights.

One kernel serves every number of rows from 1 to 16: choosing by the number of rows would change a sequence's bits
when it drafts. Choices are kept in the user's cache, by chip, macOS, MLX, mlx-lm, our sources and shape.
"""

import hashlib
import json
import logging
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...errors import HeadstartError
from ..cache import cache_folder, refuse_shared
from ..checks import Candidate, KernelCheck
from ..setting import VARIABLE, stock_forced

MOST_ROWS = 16
TIMED = (1, 2, 4, 16)  # rows
SCORED = 3  # of these decide: a plain step, and windows of one and of three drafts
REPEATS, LAUNCHES, TURN = 5, 8, 2e-3  # a turn is up to so many launches, in about so many seconds
LARGEST = 10  # times the tolerance may an element be off
TOLERANCE = {mx.bfloat16: 2e-2, mx.float16: 3e-3, mx.float32: 1e-4}
LOG = logging.getLogger("headstart")

Run = Callable[[slice, slice], mx.array]  # of some sequences, some positions of their windows → [b, w, ...]
Runs = tuple[Run, ...]  # the one that is timed, then other forms of the kernel, which must give the same bits
Clock = Callable[[], float]


@dataclass(frozen=True)
class Operation:
    """An operation to choose a kernel for, on `sequences` windows of `width` positions."""

    operation: str
    shape: str
    candidates: Callable[[], Mapping[str, Runs | str]]  # by name, `stock` first; or why one does not fit
    sequences: int = MOST_ROWS
    width: int = 1
    comparable: Callable[[mx.array], mx.array] = lambda made: made  # what must be close to stock ops'


def decide(operation: Operation, clock: Clock = time.perf_counter) -> KernelCheck:
    """Choose the fastest candidate whose rows are independent; `stock`, the oracle, where there is none."""
    candidates = operation.candidates()
    everything = slice(0, operation.sequences), slice(0, operation.width)
    stock = candidates["stock"]
    assert not isinstance(stock, str)
    expected = operation.comparable(stock[0](*everything))
    allowed = TOLERANCE[expected.dtype]
    found: dict[str, Candidate] = {}
    usable: dict[str, Run] = {}
    launches: dict[str, dict[int, int]] = {}
    for name, runs in candidates.items():
        if isinstance(runs, str):
            found[name] = Candidate(name, runs)
            continue
        try:
            made = [run(*everything) for run in runs]
            errors = [_distance(operation.comparable(each), expected) for each in made]
            wrong = next((reason for error in errors if (reason := _too_far(*error, allowed))), None)
            exact = wrong is None and all(_is_independent(operation, run, made[0]) for run in runs)
            if wrong is None:
                launches[name] = _launches(operation, runs[0], clock)
                usable[name] = runs[0]
            found[name] = Candidate(name, wrong, exact, errors[0][0])
        except Exception as failure:  # of the device's compiler, whose classes differ
            found[name] = Candidate(name, f"failed: {_message(failure)}")
    for name, seconds in _time(operation, usable, launches, clock).items():
        found[name] = replace(found[name], seconds=seconds)
    check = KernelCheck(operation.operation, operation.shape, "stock", found["stock"].exact, tuple(found.values()))
    return _fastest(check, exact=True)


def _score(candidate: Candidate) -> float:
    return sum(list(candidate.seconds.values())[:SCORED])


def _fastest(check: KernelCheck, *, exact: bool) -> KernelCheck:
    """Return a check with the fastest candidate chosen, or of the exact ones; stock ops where there is none."""
    usable = [each for each in check.candidates if each.seconds and (each.exact or not exact)]
    best = min(usable, key=_score, default=check.candidates[0])
    return replace(check, chosen=best.name, exact=best.exact)


def _too_far(error: float, largest: float, allowed: float) -> str | None:
    if not error <= allowed:  # NaN is too far
        return f"differs from stock ops by {error:.1e}, more than {allowed:.0e}"
    if not largest <= LARGEST * allowed:
        return f"differs from stock ops by {largest:.1e} in an element, more than {LARGEST * allowed:.0e}"
    return None


def _message(failure: Exception) -> str:
    """Return what an exception says, from the first line with an error of a compiler on."""
    lines = str(failure).splitlines()
    first = next((i for i, line in enumerate(lines) if "error:" in line), 0)
    return " ".join(" ".join(lines[first:]).split())[:300] or type(failure).__name__


def _distance(found: mx.array, expected: mx.array) -> tuple[float, float]:
    """Return the distance relative to the norm, and the largest of an element relative to it or to the root mean
    square, whichever is larger."""
    if found.shape != expected.shape:
        raise ValueError(f"made {found.shape}, not {expected.shape}")
    found, expected = found.astype(mx.float32), expected.astype(mx.float32)
    apart, mean = mx.abs(found - expected), mx.sqrt(mx.mean(mx.square(expected)))
    largest = mx.max(apart / mx.maximum(mx.maximum(mx.abs(expected), mean), 1e-30))
    return float(mx.linalg.norm(apart) / mx.maximum(mx.linalg.norm(expected), 1e-30)), float(largest)


def _is_independent(operation: Operation, run: Run, together: mx.array) -> bool:
    """Return whether rows have their bits of `together` in any number of sequences, and in windows of any width that
    begin and end anywhere."""
    B, W = operation.sequences, operation.width
    parts = [(slice(B - n, B), slice(0, W)) for n in range(1, B + 1)]
    if W > 1:
        parts += [(slice(0, 1), slice(W - w, W)) for w in range(1, W)]
        parts += [(slice(B - 1, B), slice(0, w)) for w in range(1, W)]
    return all(mx.array_equal(_bits(run(*part)), _bits(together[part])).item() for part in parts)


def _bits(array: mx.array) -> mx.array:
    return mx.contiguous(array).view(mx.uint16 if array.itemsize == 2 else mx.uint32)


def _turn(operation: Operation, run: Run, rows: int, launches: int, clock: Clock) -> float:
    part = (slice(0, 1), slice(0, rows)) if operation.width > 1 else (slice(0, rows), slice(0, 1))
    begun = clock()
    mx.eval([run(*part) for _ in range(launches)])
    return (clock() - begun) / launches


def _launches(operation: Operation, run: Run, clock: Clock) -> dict[int, int]:
    """Return how many launches make a turn, by rows."""
    counts = {}
    for rows in TIMED:
        _turn(operation, run, rows, 1, clock)  # compiles
        once = _turn(operation, run, rows, 1, clock)
        counts[rows] = max(1, min(LAUNCHES, int(TURN / max(once, 1e-9))))
    return counts


def _time(
    operation: Operation, candidates: Mapping[str, Run], launches: Mapping[str, Mapping[int, int]], clock: Clock
) -> dict[str, dict[int, float]]:
    """Return the median seconds of each candidate by rows, measured in turns."""
    samples = {name: {rows: list[float]() for rows in TIMED} for name in candidates}
    for _ in range(REPEATS):
        for rows in TIMED:
            for name, run in candidates.items():
                samples[name][rows].append(_turn(operation, run, rows, launches[name][rows], clock))
    return {name: {rows: statistics.median(each) for rows, each in times.items()} for name, times in samples.items()}


@cache
def identity() -> str:
    """Return what a choice is valid for: chip, macOS, MLX, mlx-lm, and the source of our kernels."""
    info = mx.device_info(mx.gpu)
    folder = Path(__file__).parent
    sources = sorted([*folder.glob("*.metal"), *folder.glob("*.py"), *folder.parent.glob("*.py")])
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    name = info.get("device_name") or info.get("architecture", "unknown")
    libraries = f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}"
    return f"{name}, macOS {platform.mac_ver()[0]}, {libraries}, kernels {digest}"


_decided: dict[str, KernelCheck] = {}  # by operation and shape, of the models that were loaded


def checks() -> list[KernelCheck]:
    """Return what was found about the kernels of the models that this process has loaded."""
    return list(_decided.values())


def kernels_in_use() -> str:
    """Return in one line which kernels compute, and why stock ones where they do."""
    if stock_forced():
        return f"stock ({VARIABLE}=stock)"
    if not _decided:
        return "stock (metal, nothing checked)"
    stock = [each for each in checks() if each.chosen == "stock"]
    inexact = [f"{each.operation} {each.shape}" for each in checks() if not each.exact]
    refused = sorted({f"{c.name}: {c.refused}" for each in stock for c in each.candidates if c.refused})
    parts = [f"metal, {len(_decided) - len(stock)} of {len(_decided)} operations"]
    parts += [f"not exact: {', '.join(inexact[:3])}"] * bool(inexact) + refused[:3]
    return f"{'native' if len(stock) < len(_decided) else 'stock'} ({'; '.join(parts)})"


def chosen_kernel(operation: str, shape: str) -> str:
    """Return what computes an operation: stock ops where nothing was checked."""
    found = _decided.get(f"{operation} {shape}")
    return found.chosen if found is not None else "stock"


def is_exact(operations: Iterable[Operation]) -> bool:
    """Return whether all of these operations were found to compute rows independently."""
    found = [_decided.get(f"{each.operation} {each.shape}") for each in operations]
    return all(each is not None and each.exact for each in found)


def choose(
    operations: Iterable[Operation],
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
    clock: Clock = time.perf_counter,
    *,
    exact: bool = True,
) -> None:
    """Choose kernels for a model's operations: as before where they were checked on this machine, else check them
    now. Where one of them cannot be exact, or the model is not for another reason (`exact`), the fastest are chosen.

    `progress` is called with the number of checks done, of all, and what comes next.
    """
    wanted = {f"{each.operation} {each.shape}": each for each in operations}
    path, valid_for = cache_folder() / "metal.json", identity()
    kept, saves = _read(path, valid_for), True
    new = [key for key in wanted if key not in _decided]
    _decided.update({key: kept[key] for key in new if key in kept})
    missing = {key: wanted[key] for key in new if key not in kept}
    for done, (key, operation) in enumerate(missing.items()):
        progress(done, len(missing), key)
        try:
            _decided[key] = decide(operation, clock)
            saves = saves and _save(path, valid_for, key, _decided[key])
        except Exception as error:  # stock ops themselves failed: the model will say so if it needs them
            failed = Candidate("stock", f"failed: {_message(error)}")
            _decided[key] = KernelCheck(operation.operation, operation.shape, "stock", False, (failed,))
    if missing:
        progress(len(missing), len(missing), "")
    # If the model cannot be exact, nothing is lost by speed. Models before it keep what they were found exact with.
    # If it can, models before it that are not get the exact ones, too.
    exact = exact and all(_fastest(_decided[key], exact=True).exact for key in wanted)
    _decided.update({key: _fastest(_decided[key], exact=exact) for key in (wanted if exact else new)})


def _read(path: Path, valid_for: str) -> dict[str, KernelCheck]:
    """Return the choices in a file. One that is missing, damaged, outdated or not the user's only costs time."""
    try:
        refuse_shared(path.parent)
        stored: Any = json.loads(path.read_text())
        return {key: _restore(key, value) for key, value in stored[valid_for].items()}
    except HeadstartError as error:
        LOG.warning("Choices of Metal kernels are not kept: %s", error)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        pass
    return {}


def _restore(key: str, value: Any) -> KernelCheck:
    candidates = []
    for each in value["candidates"]:
        seconds = {int(rows): float(time) for rows, time in each["seconds"].items()}
        candidates.append(Candidate(**{**each, "seconds": seconds}))
    check = KernelCheck(**{**value, "candidates": tuple(candidates)})
    chosen = [each for each in candidates if each.name == check.chosen]
    if key != f"{check.operation} {check.shape}" or [each.exact for each in chosen] != [check.exact]:
        raise ValueError(f"{key} is not consistent")
    return check


def _save(path: Path, valid_for: str, key: str, check: KernelCheck) -> bool:
    """Add a choice to a file. Return whether that succeeded."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        refuse_shared(path.parent)
        checks = {**_read(path, valid_for), key: check}
        stored = {valid_for: {key: asdict(check) for key, check in checks.items()}}
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix="metal-", delete=False) as file:
            json.dump(stored, file, indent=1)
        Path(file.name).replace(path)
        return True
    except HeadstartError:
        pass  # `_read` has said why
    except OSError as error:
        LOG.warning("Choices of Metal kernels are not kept: %s cannot be written (%s)", path.parent, error.strerror)
    return False
