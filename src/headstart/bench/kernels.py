"""Which kernels compute a model here, by what they compute: ours, or those of mlx and mlx-lm."""

from collections import Counter

import mlx.core as mx
import mlx.nn as nn

from ..kernels import cpu
from ..kernels.cuda import on_cuda
from ..kernels.cuda.attention import attention_fits
from ..kernels.cuda.gated_delta import gated_delta_fits
from ..kernels.cuda.products import matrix_weights, product_refusal
from ..models import Model
from ..state import KV, Recurrent

OURS = "Headstart's"


def kernels_in_use(model: Model) -> dict[str, str]:
    """In decoding and verifying. Prompts are read with the same kernels on a CPU, with stock ones elsewhere."""
    used = {"products": _products(model)}
    if mx.default_device() == mx.cpu:
        used["CPU"] = str(cpu.loaded())
    for layer, memory in zip(model.weights.layers, model.make_state(1).layers, strict=True):
        if isinstance(memory, KV):
            ours = _on_cpu() and cpu.native_attention_fits(model.dtype, layer.self_attn)
            ours = ours or attention_fits(1, layer.self_attn.num_attention_heads, memory.keys)
            used["attention"] = OURS if ours else "mlx's"
        elif isinstance(memory, Recurrent):
            ours = _on_cpu() and cpu.native_gated_delta_fits(model.dtype, memory.state)
            ours = ours or gated_delta_fits(memory.state, model.dtype)
            used["recurrence"] = OURS if ours else "mlx-lm's Metal kernel" if _on_metal() else "mlx-lm's stock ops"
    return used


def _products(model: Model) -> str:
    """Those that ours does not take are counted, with the reasons."""
    if not on_cuda() and not _on_cpu():
        return "mlx's"
    leaves = [leaf for _, leaf in model.weights.named_modules() if "weight" in leaf]
    reasons = Counter(
        _refusal(model.dtype, leaf)
        for leaf in leaves
        if leaf.weight.ndim > 1 and not isinstance(leaf, nn.Conv1d)  # norms and short convolutions multiply otherwise
    )
    ours = reasons.pop(None, 0)
    others = [f"mlx's for {count} ({reason})" for reason, count in reasons.items()]
    return ", ".join([f"{OURS} for {ours}", *others])


def _refusal(dtype: mx.Dtype, leaf: nn.Module) -> str | None:
    if not _on_cpu():
        return product_refusal(dtype, matrix_weights(leaf))
    return None if cpu.linear(leaf, dtype) is not None else "of another kind"


def _on_cpu() -> bool:
    return cpu.native() is not None


def _on_metal() -> bool:
    return bool(mx.metal.is_available()) and mx.default_device() == mx.gpu
