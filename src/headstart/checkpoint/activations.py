"""The type of activations. GPUs of M1 and M2 have no bfloat16: float16, except for what would overflow in it."""

import os
import re

import mlx.core as mx

from ..errors import CheckpointError
from ..kernels import Backend
from ..models import Model

TYPES = ("bfloat16", "float16", "float32")  # values of HEADSTART_DTYPE
WITHOUT_BFLOAT16 = re.compile(r"applegpu_g1[34]\D")  # Metal's names of M1's and M2's GPUs
CALIBRATION = 64  # tokens; the first is where activations are largest


def compute_dtype(backend: Backend, stored: str, experts: bool, modes: set[str]) -> mx.Dtype:
    """Return the type of activations, and of all weights that are not quantised: HEADSTART_DTYPE, or the file's own,
    unless the backend computes another better. `modes` are those of the quantised weights.

    The GPUs of M1 and M2 have no bfloat16, so there it becomes float16.
    """
    if chosen := os.environ.get("HEADSTART_DTYPE"):
        if chosen not in TYPES:
            raise CheckpointError(f"HEADSTART_DTYPE is {chosen!r}; set it to one of {', '.join(TYPES)}.")
        stored = chosen
    elif stored == "bfloat16" and WITHOUT_BFLOAT16.match(str(mx.device_info().get("architecture"))):
        stored = "float16"
    return backend.activations(getattr(mx, stored), experts, modes)


def tower_dtype(dtype: mx.Dtype, stored: str) -> mx.Dtype:
    """Return the type of a vision tower. Released ones overflow in float16, and run once for a picture."""
    return mx.bfloat16 if dtype == mx.float16 and stored == "bfloat16" else dtype


def overflows(model: Model, stored: str) -> bool:
    """Return whether a model that was stored in bfloat16 and computes in float16 overflows in a short prompt."""
    if model.dtype != mx.float16 or stored != "bfloat16" or os.environ.get("HEADSTART_DTYPE"):
        return False
    tokens = (mx.arange(min(CALIBRATION, model.context_length - 1))[None] * 37 + 11) % model.vocabulary
    hidden = model.trunk(tokens, model.make_state(1), certain=tokens.shape[1])
    return not mx.all(mx.isfinite(model.logits(hidden))).item()
