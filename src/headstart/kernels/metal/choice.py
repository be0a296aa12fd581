"""Check kernels on the user's machine, time them beside stock ops, and choose one for each shape of weights.

One kernel serves every number of rows from 1 to 16, or to 64: choosing by the number of rows would change a
sequence's bits when it drafts. Choices are kept in the user's cache, by chip, macOS, MLX, mlx-lm, our sources and
shape.
"""

import hashlib
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from ..cache import cache_folder
from ..checks import Candidate, KernelCheck
from ..setting import VARIABLE, stock_forced
from .kept import read_checks, save_check
from .trials import Trials

MOST_ROWS = 16
WIDE_ROWS = 64  # of kernels that multiply matrices
WIDER = (17, 24, 25, 32, 33, 48, 49, 63)  # rows that are looked at beyond MOST_ROWS
TIMED = (1, 4)  # rows: a plain step, and a window of three drafts
TIMING = "all of them, in turns"
REPEATS, LAUNCHES, TURN = 5, 8, 2e-3  # a turn is up to so many launches, in about so many seconds
TOO_MANY = "maximum allowed threads per threadgroup"  # MLX says of a pipeline
LARGEST = 10  # times the tolerance may an element be off
TOLERANCE = {mx.bfloat16: 2e-2, mx.float16: 3e-3, mx.float32: 1e-4}

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
    forms: int = 1  # of the kernels, that the model uses
    narrower: Mapping[str, str] = field(default_factory=dict)  # candidates with fewer threads than others, by name

    @property
    def names(self) -> tuple[str, str]:
        return self.operation, self.shape

    @property
    def key(self) -> str:
        return f"{self.operation} {self.shape}"


def decide(operation: Operation, clock: Clock = time.perf_counter, trials: Trials | None = None) -> KernelCheck:
    """Choose the fastest candidate whose rows are independent; `stock`, the oracle, where there is none.

    Candidates with fewer threads are left out unless a pipeline does not take those of the others.
    """
    candidates = operation.candidates()
    first = {name: runs for name, runs in candidates.items() if name not in operation.narrower}
    check = _decide(operation, first, clock, trials)
    refused = {each.name for each in check.candidates if TOO_MANY in (each.refused or "")}
    also = {name: candidates[name] for name, wide in operation.narrower.items() if wide in refused}
    return _decide(operation, first | also, clock, trials) if also else check


def _decide(
    operation: Operation, candidates: Mapping[str, Runs | str], clock: Clock, trials: Trials | None
) -> KernelCheck:
    """Choose among candidates. Each is compared and timed at a few widths. From the fastest on they are then looked
    at in every form and at every width, until one is independent: what is slower is not compiled for those."""
    found: dict[str, Candidate] = {}
    runnable: dict[str, Runs] = {}
    for name, runs in candidates.items():
        if refused := runs if isinstance(runs, str) else _crashed(operation, name, trials):
            found[name] = Candidate(name, refused)
        elif not isinstance(runs, str):
            runnable[name] = runs
            found[name] = Candidate(name)

    def trying(what: str) -> AbstractContextManager[None]:
        return trials.trying(operation.key, what) if trials else nullcontext()

    if "stock" in runnable:  # else there is nothing to compare with
        stock = runnable["stock"][0]
        expected = {rows: operation.comparable(stock(*_narrow(operation, rows))) for rows in TIMED}
        for name, runs in runnable.items():
            with trying(name):
                found[name] = _compare(operation, name, runs[0], expected, clock)
        usable = {name: runs[0] for name, runs in runnable.items() if found[name].refused is None}
        with trying(TIMING):
            for name, timed in _time(operation, usable, clock).items():
                told = {"refused": timed} if isinstance(timed, str) else {"seconds": timed}
                found[name] = replace(found[name], **told)
        for name in sorted((name for name in usable if found[name].seconds), key=lambda name: _score(found[name])):
            with trying(name):
                found[name] = _prove(operation, found[name], runnable[name], stock, clock)
            if found[name].exact:
                break
    tried = tuple(found.values())
    check = KernelCheck(operation.operation, operation.shape, "stock", False, tried, operation.forms)
    return _fastest(check, exact=True)


def _crashed(operation: Operation, name: str, trials: Trials | None) -> str | None:
    """Return why a candidate is not tried again. Which of those that are timed in turns ended a process is not known:
    one of ours."""
    if trials is None:
        return None
    in_turns = None if name.startswith("stock") else trials.refusal(operation.key, TIMING)
    return trials.refusal(operation.key, name) or in_turns


def _narrow(operation: Operation, rows: int) -> tuple[slice, slice]:
    """Return so many positions: of one sequence, or of sequences where windows have one."""
    return (slice(0, 1), slice(0, rows)) if operation.width > 1 else (slice(0, rows), slice(0, 1))


def _compare(operation: Operation, name: str, run: Run, expected: Mapping[int, mx.array], clock: Clock) -> Candidate:
    """Run a candidate at a few widths, and compare it with stock ops."""
    begun = clock()
    try:
        pairs = [(operation.comparable(run(*_narrow(operation, rows))), right) for rows, right in expected.items()]
        errors = _distances(pairs)
    except Exception as failure:  # of the device's compiler, whose classes differ
        return Candidate(name, f"failed: {_message(failure)}")
    wrong = _too_far(errors, pairs[0][1].dtype)
    return Candidate(name, wrong, error=max(error for error, _ in errors), first=clock() - begun)


def _prove(operation: Operation, tried: Candidate, runs: Runs, stock: Run, clock: Clock) -> Candidate:
    """Look whether a row has the same bits whatever stands beside it, in every form of a kernel."""
    begun, everything = clock(), (slice(0, operation.sequences), slice(0, operation.width))
    try:
        expected, together = operation.comparable(stock(*everything)), runs[0](*everything)
        pairs = [(operation.comparable(run(*everything)), expected) for run in runs]
        same = [each for run in runs for each in _same_bits(operation, run, together)]
        errors = _distances(pairs, same)
    except Exception as failure:
        return replace(tried, refused=f"failed: {_message(failure)}", seconds={})
    if wrong := _too_far(errors, expected.dtype):
        return replace(tried, refused=wrong, seconds={}, exact=None)
    return replace(tried, exact=all(each.item() for each in same), first=(tried.first or 0) + clock() - begun)


def _score(candidate: Candidate) -> float:
    return sum(candidate.seconds.values())


def _fastest(check: KernelCheck, *, exact: bool) -> KernelCheck:
    """Return a check with the fastest candidate chosen, or of the exact ones; stock ops where there is none."""
    usable = [each for each in check.candidates if each.seconds and (each.exact or not exact)]
    best = min(usable, key=_score, default=check.candidates[0])
    return replace(check, chosen=best.name, exact=bool(best.exact))


def _too_far(errors: list[tuple[float, float]], dtype: mx.Dtype) -> str | None:
    allowed = TOLERANCE[dtype]
    for error, largest in errors:
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


def _distances(pairs: list[tuple[mx.array, mx.array]], others: Sequence[mx.array] = ()) -> list[tuple[float, float]]:
    """Return how far what was found is from what was expected, pair by pair. Waits once for all, and for others."""
    found = [_distance(*pair) for pair in pairs]
    wait([*(each for pair in found for each in pair), *others])
    return [(float(error), float(largest)) for error, largest in found]


def _distance(found: mx.array, expected: mx.array) -> tuple[mx.array, mx.array]:
    """Return the distance relative to the norm, and the largest of an element relative to it or to the root mean
    square, whichever is larger."""
    if found.shape != expected.shape:
        raise ValueError(f"made {found.shape}, not {expected.shape}")
    found, expected = found.astype(mx.float32), expected.astype(mx.float32)
    apart, mean = mx.abs(found - expected), mx.sqrt(mx.mean(mx.square(expected)))
    largest = mx.max(apart / mx.maximum(mx.maximum(mx.abs(expected), mean), 1e-30))
    return mx.linalg.norm(apart) / mx.maximum(mx.linalg.norm(expected), 1e-30), largest


def wait(arrays: list[mx.array]) -> None:
    """Wait for the device. Nothing else here does."""
    mx.eval(arrays)


def _same_bits(operation: Operation, run: Run, together: mx.array) -> Iterator[mx.array]:
    """Yield whether rows have their bits of `together` in any number of sequences, and in windows of any width that
    begin and end anywhere. Where windows have one position, each is looked at alone and in a pair: another order of
    sums shows in few elements once they are rounded."""
    B, W = operation.sequences, operation.width
    counts = [n for n in range(1, B + 1) if n <= MOST_ROWS or n in (*WIDER, B)]
    parts = [(slice(B - n, B), slice(0, W)) for n in counts]
    if W == 1:
        parts += [(slice(i, i + n), slice(0, 1)) for n in (1, 2) for i in range(0, B - n, n)]
    if W > 1:
        parts += [(slice(0, 1), slice(W - w, W)) for w in range(1, W)]
        parts += [(slice(B - 1, B), slice(0, w)) for w in range(1, W)]
    for part in parts:
        yield mx.array_equal(_bits(run(*part)), _bits(together[part]))


def _bits(array: mx.array) -> mx.array:
    return mx.contiguous(array).view(mx.uint16 if array.itemsize == 2 else mx.uint32)


def _turn(operation: Operation, run: Run, rows: int, launches: int, clock: Clock) -> float:
    begun = clock()
    wait([run(*_narrow(operation, rows)) for _ in range(launches)])
    return (clock() - begun) / launches


def _time(operation: Operation, candidates: Mapping[str, Run], clock: Clock) -> dict[str, dict[int, float] | str]:
    """Return the median seconds of each candidate by rows, measured in turns, or why it failed."""
    counts, samples = dict[tuple[str, int], int](), dict[tuple[str, int], list[float]]()
    failed = dict[str, dict[int, float] | str]()
    for turn in range(1 + REPEATS):
        for rows in TIMED:
            for name in [each for each in candidates if each not in failed]:
                try:
                    taken = _turn(operation, candidates[name], rows, counts.get((name, rows), 1), clock)
                except Exception as failure:
                    failed[name] = f"failed: {_message(failure)}"
                    continue
                if not turn:
                    counts[name, rows] = max(1, min(LAUNCHES, int(TURN / max(taken, 1e-9))))
                else:
                    samples.setdefault((name, rows), []).append(taken)
    done = [name for name in candidates if name not in failed]
    return failed | {name: {rows: statistics.median(samples[name, rows]) for rows in TIMED} for name in done}


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


def decided(operation: str, shape: str) -> bool:
    return f"{operation} {shape}" in _decided


def is_exact(operations: Iterable[Operation]) -> bool:
    """Return whether all of these operations were found to compute rows independently, in all their forms."""
    found = [(each, _decided.get(each.key)) for each in operations]
    return all(check is not None and check.exact and check.forms >= each.forms for each, check in found)


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
    wanted = {each.key: each for each in operations}
    path, valid_for = cache_folder() / "metal.json", identity()
    kept = {key: each for key, each in read_checks(path, valid_for).items() if key in wanted}
    kept = {key: each for key, each in kept.items() if each.forms >= wanted[key].forms}
    new = [key for key in wanted if key not in _decided or _decided[key].forms < wanted[key].forms]
    _decided.update({key: kept[key] for key in new if key in kept})
    _check({key: wanted[key] for key in new if key not in kept}, path, valid_for, progress, clock)
    # If the model cannot be exact, nothing is lost by speed. Models before it keep what they were found exact with.
    # If it can, models before it that are not get the exact ones, too.
    exact = exact and all(_fastest(_decided[key], exact=True).exact for key in wanted)
    _decided.update({key: _fastest(_decided[key], exact=exact) for key in (wanted if exact else new)})


def _check(
    missing: Mapping[str, Operation],
    path: Path,
    valid_for: str,
    progress: Callable[[int, int, str], None],
    clock: Clock,
) -> None:
    """Check operations that were not checked before, and keep what was found."""
    if not missing:
        return
    trials, saves = Trials(path.parent, valid_for), True
    try:
        for done, (key, operation) in enumerate(missing.items()):
            progress(done, len(missing), key)
            try:
                _decided[key] = decide(operation, clock, trials)
                saves = saves and save_check(path, valid_for, key, _decided[key])
            except Exception as error:  # stock ops themselves failed: the model will say so if it needs them
                failed = Candidate("stock", f"failed: {_message(error)}")
                _decided[key] = KernelCheck(operation.operation, operation.shape, "stock", False, (failed,))
    finally:
        trials.close()
    progress(len(missing), len(missing), "")
