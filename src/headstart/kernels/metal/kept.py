"""Choices of kernels in the user's cache, from one process to the next."""

import json
import logging
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ...errors import HeadstartError
from ..cache import refuse_shared
from ..checks import Candidate, KernelCheck

LOG = logging.getLogger("headstart")


def read_checks(path: Path, valid_for: str) -> dict[str, KernelCheck]:
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
    check = KernelCheck(**{**value, "candidates": tuple(candidates), "kept": True})
    chosen = [each for each in candidates if each.name == check.chosen]
    if key != f"{check.operation} {check.shape}" or [bool(each.exact) for each in chosen] != [check.exact]:
        raise ValueError(f"{key} is not consistent")
    return check


def save_check(path: Path, valid_for: str, key: str, check: KernelCheck) -> bool:
    """Add a choice to a file. Return whether that succeeded."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        refuse_shared(path.parent)
        checks = {**read_checks(path, valid_for), key: check}
        stored = {valid_for: {key: asdict(replace(check, kept=False)) for key, check in checks.items()}}
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix="metal-", delete=False) as file:
            json.dump(stored, file, indent=1)
        Path(file.name).replace(path)
        return True
    except HeadstartError:
        pass  # `read_checks` has said why
    except OSError as error:
        LOG.warning("Choices of Metal kernels are not kept: %s cannot be written (%s)", path.parent, error.strerror)
    return False
