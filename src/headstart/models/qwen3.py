"""Qwen2, Qwen2.5 and Qwen3, dense and mixture of experts: no head."""

from mlx_lm.models import qwen2, qwen3, qwen3_moe

from .family import plain_family
from .windows import windowed, windowed_attention

QWEN2 = plain_family("qwen2", qwen2, build=windowed(qwen2), mixer=windowed_attention)
QWEN3 = plain_family("qwen3", qwen3, build=windowed(qwen3), mixer=windowed_attention)
QWEN3_MOE = plain_family("qwen3_moe", qwen3_moe, build=windowed(qwen3_moe), mixer=windowed_attention)
