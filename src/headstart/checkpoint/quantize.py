"""How `convert` and `graft` quantise: the trunk as mlx-lm does, the head with bits of its own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.convert import QUANT_RECIPES, mixed_quant_predicate_builder

from ..errors import CheckpointError
from ..models import HeadSpec
from .parameters import BITS, GROUP_SIZES

ROUTERS = ("mlp.gate", "mlp.gate.gate", "mlp.router.classifier", "mlp.shared_expert_gate")
ROUTER = {"group_size": 64, "bits": 8}

Quantization = dict[str, Any]  # group_size, bits
Choose = Callable[[str, nn.Module], Quantization | None]  # by the path of a module and the module


@dataclass(frozen=True)
class Recipe:
    """The options of a conversion.

    Args:
        bits: Of the trunk. None: not quantised.
        mixed: One of mlx-lm's mixed-precision recipes, instead of `bits`.
        mtp_bits: Of the head: "keep", or a number. None: 8 where the trunk is quantised, else not quantised. `mtp.fc`
            and norms are never quantised.
    """

    dtype: mx.Dtype
    bits: int | None = None
    group_size: int = 64
    mixed: str | None = None
    mtp_bits: str | int | None = None

    def __post_init__(self) -> None:
        bits, sizes = (", ".join(map(str, known)) for known in (BITS, GROUP_SIZES))
        if self.bits not in (None, *BITS):
            raise CheckpointError(f"{self.bits} bits: mlx quantises to {bits} bits.")
        if str(self.mtp_bits) not in ("None", "keep", *map(str, BITS)):
            raise CheckpointError(f"--mtp-bits {self.mtp_bits}: say keep, or one of {bits}.")
        if self.group_size not in GROUP_SIZES:
            raise CheckpointError(f"groups of {self.group_size}: mlx quantises in groups of {sizes}.")
        if self.mixed not in (None, *QUANT_RECIPES):
            raise CheckpointError(f"{self.mixed}: mlx-lm has the recipes {', '.join(QUANT_RECIPES)}.")
        if self.mixed is not None and self.bits is not None:
            raise CheckpointError(f"{self.mixed} says how many bits each layer has: leave --bits out.")

    @property
    def quantises(self) -> bool:
        return self.bits is not None or self.mixed is not None

    @property
    def head_bits(self) -> int | None:
        """Return the bits of the head; None: not quantised."""
        if self.mtp_bits is None:
            return 8 if self.quantises else None
        return None if self.mtp_bits == "keep" else int(self.mtp_bits)

    def for_trunk(self, lm: nn.Module) -> Choose:
        if self.mixed is not None:
            choose: Any = mixed_quant_predicate_builder(self.mixed, lm, self.group_size)
            return choose
        return lambda path, module: {"group_size": self.group_size, "bits": self.bits} if self.bits else None

    def for_head(self, spec: HeadSpec) -> Choose:
        how = {"group_size": self.group_size, "bits": self.head_bits} if self.head_bits else None
        return lambda path, module: None if path.endswith(f".{spec.names.fc}") else how


def choose_quantization(path: str, module: nn.Module, choose: Choose) -> Quantization | None:
    """Return what `choose` says of a module, 8 bits for a router, None where mlx-lm could not quantise it either."""
    found = choose(path, module) if hasattr(module, "to_quantized") else None
    if found and path.endswith(ROUTERS):
        found = ROUTER
    return found if found and module.weight.shape[-1] % found["group_size"] == 0 else None
