"""Models of released shapes with random quantised weights, drawn on the device: nothing is downloaded."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from headstart import models
from headstart.models import Model

COMMON: dict[str, Any] = {
    "vocab_size": 248320,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "mtp_num_hidden_layers": 1,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
SHAPES: dict[str, dict[str, Any]] = {
    "27b": COMMON
    | {
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "intermediate_size": 17408,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
    },
    "35b": COMMON
    | {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "intermediate_size": 512,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
}
SHAPES["tiny"] = SHAPES["27b"] | {  # to try a benchmark without a card
    "vocab_size": 4096,
    "max_position_embeddings": 6000,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "head_dim": 64,
}


@dataclass(frozen=True)
class Mode:
    """How matrices are quantised: all alike, or some by a part of their names in another way."""

    name: str = "affine"
    bits: int = 4
    group: int = 64
    others: tuple[tuple[str, int], ...] = ()  # parts of names, and their bits

    def of(self, path: str) -> dict[str, Any]:
        bits = next((bits for part, bits in self.others if part in path), self.bits)
        return {"group_size": self.group, "bits": bits, "mode": self.name}

    def quantise(self, part: nn.Module) -> None:
        chosen = lambda path, module: self.of(path) if quantises(path, module) else False  # noqa: E731
        nn.quantize(part, self.group, self.bits, mode=self.name, class_predicate=chosen)


def random_model(shape: dict[str, Any], mode: Mode = Mode()) -> tuple[Model, nn.Module]:
    """The model, and mlx-lm's own over the same weights with its own norms."""
    built = models.build(shape)
    for part in (built.lm, built.weights.mtp):
        mode.quantise(part)
    model = Model(
        built.family,
        built.config,
        built.lm,
        models.Weights(built.family.text(built.lm), built.family.lm_head(built.lm), built.weights.mtp),
        mx.bfloat16,
    )
    flat: Any = tree_flatten(model.weights.parameters())
    for name, array in flat:
        if array.dtype == mx.uint32:
            array = random_codes(array.shape)
        elif name.endswith((".scales", ".biases")):
            array = mx.zeros(array.shape, array.dtype if array.dtype == mx.uint8 else mx.bfloat16)
        elif not name.endswith(("norm.weight", "norm_embedding.weight", "norm_hidden.weight", "A_log")):
            array = (mx.random.normal(array.shape) * array.shape[-1] ** -0.5).astype(mx.bfloat16)
        mx.eval(array)
        model.weights.update(tree_unflatten([(name, array)]))
    for _, module in model.weights.named_modules():
        if "scales" in module:
            draw_scales(module)
    theirs = built.family.build(shape)
    mode.quantise(theirs)
    kept: Any = tree_flatten(model.lm.parameters())
    theirs.update(tree_unflatten([(n, a.astype(mx.bfloat16) if n.endswith("norm.weight") else a) for n, a in kept]))
    mx.eval(theirs.parameters())
    return model, theirs


def draw_scales(module: nn.Module) -> None:
    """Give a module whose codes are drawn such scales that its products are about as large as what it is given."""
    inputs = module.weight.shape[-1] * 32 // module.bits
    if module.mode == "affine":
        spread = 2 * inputs**-0.5 / 2 ** (module.bits - 1)
        scales = mx.random.uniform(0.5, 1.5, module.scales.shape) * spread
        module.scales = scales.astype(mx.bfloat16)
        module.biases = (-scales * (2**module.bits - 1) / 2).astype(mx.bfloat16)
        mx.eval(module.scales, module.biases)
        return
    if module.mode == "mxfp8":  # codes that are no numbers, and the largest, become others
        module.weight = module.weight & 0xBFBFBFBF
    typical = {"mxfp4": 2.6, "nvfp4": 2.6, "mxfp8": 0.5}[module.mode] * inputs**0.5
    one, steps = (56, 8) if module.mode == "nvfp4" else (127, 1)  # the byte of 1, and bytes from one power of two on
    middle = round(one - steps * math.log2(typical))
    module.scales = mx.random.randint(middle - steps, middle + steps + 1, module.scales.shape).astype(mx.uint8)
    mx.eval(module.weight, module.scales)


def quantises(path: str, module: nn.Module) -> bool:
    kinds = (nn.Linear, nn.Embedding, SwitchLinear)
    return isinstance(module, kinds) and not isinstance(module, QuantizedSwitchLinear) and path != "fc"


def random_codes(shape: Sequence[int]) -> mx.array:
    high, low = (mx.random.randint(0, 2**16, shape).astype(mx.uint32) for _ in range(2))
    return high * 2**16 + low
