"""Drafts and acceptance on Apple GPUs, where their kernels were chosen."""

from ..drawn import DrawnByKernels
from .choice import chosen_kernel
from .sampling import metal_draw, metal_ratio
from .scores import metal_logprobs

SAMPLING = "sampling"


class MetalSampling(DrawnByKernels):
    """Sampling by the kernels beside this file."""

    launch_draw = staticmethod(metal_draw)
    launch_ratio = staticmethod(metal_ratio)
    launch_logprobs = staticmethod(metal_logprobs)

    def draws(self, vocabulary: int) -> bool:
        return chosen_kernel(SAMPLING, sampling_shape(vocabulary)) == "metal"


def sampling_shape(vocabulary: int) -> str:
    return f"{vocabulary} tokens"
