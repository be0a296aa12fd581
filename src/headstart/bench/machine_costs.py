"""What a model costs on this machine besides its steps: checks of kernels, descriptions of steps, memory."""

import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median

import mlx.core as mx

from ..engine.step import prefill_prompts, step
from ..kernels.checks import KernelCheck
from ..models import Model
from ..models.memory import Footprint

PROMPT = list(range(3, 35))
TIMES = 5
CONTEXT = 32_768  # tokens, whose KV cache is named
VARIABLES = re.compile(r"(MLX|AGX)_\w+|HEADSTART_(KERNELS|DTYPE|MEMORY_GB|WIRED)")  # none of them is a secret
TOO_MANY = re.compile(r"Thread group size \((\d+)\) is greater than\s+the maximum allowed\D+\((\d+)\)")  # MLX says


def settings(environment: Mapping[str, str] = os.environ) -> str:
    """Return the variables that change how MLX, the driver and the kernels work."""
    found = [f"{name}={value}" for name, value in sorted(environment.items()) if VARIABLES.fullmatch(name)]
    return ", ".join(found) or "none"


@contextmanager
def logged() -> Iterator[list[str]]:
    """Collect what is logged as a warning or an error, such as errors of a GPU that the engine gets over."""
    said: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(f"{record.levelname.lower()}: {record.getMessage()}")

    handler = Collect(logging.WARNING)
    logger = logging.getLogger("headstart")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def check_facts(checks: Iterable[KernelCheck]) -> dict[str, str]:
    """Return what the check at load took; nothing where there is none."""
    checks = list(checks)
    if not checks:
        return {}
    new = [each for each in checks if not each.kept]
    first = sum(candidate.first or 0.0 for check in new for candidate in check.candidates)
    kept = f"{len(checks) - len(new)} of {len(checks)} choices from the cache"
    refused = [TOO_MANY.search(each.refused or "") for check in checks for each in check.candidates]
    fewer = [f"{match[1]} are asked for, the pipeline takes {match[2]}" for match in refused if match]
    return {
        "kernels checked": f"{len(new)} now, whose first runs, with compiling, took {first:.1f} s; {kept}",
        "threads of a pipeline": "; ".join(fewer) or "each takes as many as are asked for",
    }


def describe_facts(model: Model) -> dict[str, str]:
    """Return the CPU time to describe a step, while a device would work on the one before."""
    depths = (0, min(3, model.max_k)) if model.has_head else (0,)
    took = {k: _describe(model, k) for k in depths}
    return {"CPU time to describe a step": ", ".join(f"{1e3 * each:.1f} ms at k = {k}" for k, each in took.items())}


def _describe(model: Model, k: int) -> float:
    batch, taken = prefill_prompts(model, [PROMPT], k), []
    for _ in range(TIMES):
        begun = time.thread_time()
        made = step(model, batch, k)
        taken.append(time.thread_time() - begun)
        mx.eval(made.verdict.tokens, *batch.arrays())
    return median(taken)


def memory_costs(model: Model) -> dict[str, str]:
    """Return the peak so far, and what a long sequence takes."""
    needs = Footprint.of(model).bytes([CONTEXT]) / 1e9
    return {
        "peak memory": f"{mx.get_peak_memory() / 1e9:.2f} GB",
        f"a sequence of {CONTEXT:,} tokens": f"{needs:.2f} GB of KV cache and what reads it",
    }
