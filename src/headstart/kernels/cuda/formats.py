"""How quantised weights are kept, as kernels for CUDA read them (see codes.cu), and which of these they take."""

from dataclasses import dataclass

import mlx.core as mx

from ..weights import MatrixWeights
from .compiler import TYPES

HALVES = (mx.bfloat16, mx.float16)
GROUPS = {"affine": (32, 64, 128), "mxfp4": (32,), "mxfp8": (32,), "nvfp4": (16,)}
READERS = {"affine": "AFFINE", "mxfp4": "MXFP", "mxfp8": "MXFP", "nvfp4": "NVFP"}


@dataclass(frozen=True)
class Format:
    """What a kernel is compiled for, of the weights that it reads."""

    mode: str
    bits: int
    group: int  # weights that share a scale
    scale: mx.Dtype | None  # the type of scales and biases; None of weights that are not quantised
    has_biases: bool
    has_whole: bool  # a scale for all numbers of a matrix

    @classmethod
    def of(cls, weights: MatrixWeights) -> "Format":
        scale = None if weights.scales is None else weights.scales.dtype
        given = weights.biases is not None, weights.whole is not None
        return cls(weights.mode, weights.bits, weights.group, scale, *given)

    @property
    def is_stream(self) -> bool:
        """Return whether codes do not begin where bytes or halves of them do."""
        return self.bits < 8 and self.bits != 4

    @property
    def fills_bytes(self) -> int:
        """Return how many weights of a row are read at a time, at least."""
        if self.is_stream:
            return 64 if self.bits == 6 else 128  # they fill pieces of 16 bytes
        return max(256 // self.bits, 64 if self.mode == "nvfp4" else 32, self.group)

    def text(self) -> str:
        """Return the type that a kernel's text calls this."""
        scale = "T" if self.scale is None else TYPES[self.scale][0]
        whole = ", true" * self.has_whole
        return f"headstart::Format<headstart::{READERS[self.mode]}, {self.bits}, {self.group}, {scale}{whole}>"

    def scale_bytes(self, inputs: int) -> int:
        """Return the bytes of the scales and biases of a row."""
        return 0 if self.scale is None else inputs // self.group * self.scale.size * (1 + self.has_biases)

    def names(self, number: int) -> dict[str, str]:
        """Return the names of a matrix's arrays in a kernel's text, by what they are."""
        names = {"w": f"w{number}"}
        if self.scale is not None:
            names["s"] = f"s{number}"
        if self.has_biases:
            names["b"] = f"b{number}"
        if self.has_whole:
            names["g"] = f"g{number}"
        return names


def arrays_of(weights: MatrixWeights) -> list[mx.array]:
    """Return the arrays of a matrix, in the order of `Format.names`."""
    return weights.arrays() if weights.whole is None else [*weights.arrays(), weights.whole]


def format_refusal(dtype: mx.Dtype, weights: MatrixWeights) -> str | None:
    """Return why kernels do not read weights in this format for activations of a type; None where they do."""
    if dtype not in HALVES:
        return f"activations are {_name(dtype)}"
    if weights.scales is None:
        return None if weights.weight.dtype == dtype else f"weights are {_name(weights.weight.dtype)}"
    if weights.mode not in GROUPS:
        return f"quantised as {weights.mode}"
    if weights.group not in GROUPS[weights.mode]:
        return f"{weights.bits} bits in groups of {weights.group}"
    kinds = (*HALVES, mx.float32) if weights.mode == "affine" else (mx.uint8,)
    alike = weights.biases is None or weights.biases.dtype == weights.scales.dtype
    if weights.scales.dtype not in kinds or not alike:
        return f"scales are {_name(weights.scales.dtype)}" + ", biases are not" * (not alike)
    if weights.whole is not None and weights.whole.dtype != mx.float32:
        return f"the scale of all numbers is {_name(weights.whole.dtype)}"
    return None


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
