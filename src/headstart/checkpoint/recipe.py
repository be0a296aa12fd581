"""What is quantised, and how: one policy for `convert` and `graft`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.convert import QUANT_RECIPES, mixed_quant_predicate_builder

from ..errors import CheckpointError
from .parameters import BITS

ROUTERS = ("mlp.gate", "mlp.shared_expert_gate")
ROUTER = {"group_size": 64, "bits": 8}
GROUP_SIZES = (32, 64, 128)

MtpBits = Literal["keep"] | int
Packing = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """`bits` None leaves the trunk as it is. `mtp_bits` None is the default for the head: 8 bits where the trunk
    is quantised (never less than the trunk has), else as it is; `mtp.fc` and norms are kept in any case."""

    dtype: mx.Dtype
    bits: int | None = None
    group_size: int = 64
    mixed: str | None = None  # one of mlx-lm's recipes
    mtp_bits: MtpBits | None = None

    def __post_init__(self) -> None:
        bits = [b for b in (self.bits, self.mtp_bits) if isinstance(b, int)]
        if wrong := [b for b in bits if b not in BITS]:
            raise CheckpointError(f"{wrong[0]} bits: mlx quantises to {', '.join(map(str, BITS))} bits.")
        if self.group_size not in GROUP_SIZES:
            raise CheckpointError(
                f"groups of {self.group_size}: mlx quantises in groups of {', '.join(map(str, GROUP_SIZES))}."
            )
        if self.mixed is not None and self.mixed not in QUANT_RECIPES:
            raise CheckpointError(f"{self.mixed}: mlx-lm has the recipes {', '.join(QUANT_RECIPES)}.")
        if self.mixed is not None and self.bits is not None:
            raise CheckpointError(f"{self.mixed} says how many bits each layer has: leave --bits out.")

    @property
    def quantises(self) -> bool:
        return self.bits is not None or self.mixed is not None

    @property
    def head_bits(self) -> int | None:
        """None: as it is."""
        if self.mtp_bits is not None:
            return self.mtp_bits if self.mtp_bits != "keep" else None
        return 8 if self.quantises else None

    def of_trunk(self, lm: nn.Module) -> Callable[[str, nn.Module], Packing | None]:
        """By mlx-lm's path of a module."""
        choose: Any  # (path, module) → Packing
        if self.mixed is not None:
            choose = mixed_quant_predicate_builder(self.mixed, lm, self.group_size)
        else:
            choose = lambda path, module: {"group_size": self.group_size, "bits": self.bits}  # noqa: E731
        return lambda path, module: _fitting(path, module, choose) if self.quantises else None

    def of_head(self, path: str, module: nn.Module) -> Packing | None:
        if self.head_bits is None or path == "mtp.fc":
            return None
        return _fitting(path, module, lambda *_: {"group_size": self.group_size, "bits": self.head_bits})


def _fitting(path: str, module: nn.Module, choose: Callable[[str, nn.Module], Packing]) -> Packing | None:
    """None where the module cannot be quantised, as in mlx-lm: groups must fill a row."""
    if not hasattr(module, "to_quantized"):
        return None
    how = ROUTER if path.endswith(ROUTERS) else choose(path, module)
    return None if module.weight.shape[-1] % how["group_size"] else how


def mtp_bits_from(text: str | None) -> MtpBits | None:
    """What `--mtp-bits` says."""
    if text is None or text == "keep":
        return text  # type: ignore[return-value]
    if text.isdecimal() and int(text) in BITS:
        return int(text)
    raise CheckpointError(f"--mtp-bits {text}: say keep, or one of {', '.join(map(str, BITS))}.")
