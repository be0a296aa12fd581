"""Qwen2, Qwen2.5 and Qwen3, dense and mixture of experts: released without a head; `train-head` makes one."""

from types import ModuleType

from mlx_lm.models import qwen2, qwen3, qwen3_moe

from .family import Family, plain_family
from .windows import trained_head_layer, windowed, windowed_attention


def qwen_family(name: str, module: ModuleType) -> Family:
    return plain_family(name, module, build=windowed(module), mixer=windowed_attention, head_layer=trained_head_layer)


QWEN2 = qwen_family("qwen2", qwen2)
QWEN3 = qwen_family("qwen3", qwen3)
QWEN3_MOE = qwen_family("qwen3_moe", qwen3_moe)
