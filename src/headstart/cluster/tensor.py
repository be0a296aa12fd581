"""Tensor parallel: every machine has a part of every layer, and they add up what it makes.

Attention and GatedDeltaNet are divided by heads, MLPs and experts by their hidden units: the weights that lead there
by their outputs, those that lead back by their inputs. So each half of a layer is one sum, over a window of any
width. Norms, routers, the embedding and the multi-token-prediction head are whole everywhere: drafts cost no message.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError
from ..models import Model
from .wire import Wire

IN = {
    "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj",
    "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba",
}  # fmt: skip
OUT = {"o_proj", "down_proj", "out_proj"}
BY_VALUE_HEAD = {"A_log", "dt_bias"}

# Of config.json's text part. Keys and values of attention are handled apart: a head may be on several machines.
DIVIDED = (
    "num_attention_heads", "linear_num_key_heads", "linear_num_value_heads",
    "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Tensor:
    wire: Wire
    layers: int
    channels: tuple[int, ...]  # of the convolution: queries, keys, values
    kv_heads: int

    ends = True

    @classmethod
    def of(cls, config: dict[str, Any], wire: Wire) -> "Tensor":
        """Of the model that config.json's text part describes."""
        ranks, kv_heads = wire.ranks, int(config["num_key_value_heads"])
        experts = bool(config.get("num_experts"))
        names = [name for name in DIVIDED if config.get(name) and not (experts and name == "intermediate_size")]
        wrong = [name for name in names if config[name] % ranks]
        if kv_heads % ranks and ranks % kv_heads:
            wrong.append("num_key_value_heads")
        if wrong:
            raise CheckpointError(
                f"config.json: {wrong[0]} is {config[wrong[0]]}, which {ranks} machines cannot share alike: "
                "use --split pipeline, or another number of machines"
            )
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        return cls(wire, config["num_hidden_layers"], (keys, keys, values), kv_heads)

    @property
    def ranks(self) -> int:
        return self.wire.ranks

    @property
    def operations(self) -> int:
        """In one pass, one after the other."""
        return 2 * self.layers

    def holds(self, name: str) -> bool:
        return True

    def cut(self, name: str, array: mx.array) -> mx.array:
        """This machine's part of the parameter `name`. Quantised weights, their scales and biases are cut alike."""
        *path, module, leaf = name.split(".")
        if path[:1] != ["layers"]:
            return array
        if leaf in BY_VALUE_HEAD:
            return self._part(name, array, 0)
        if module == "conv1d":
            return self._part(name, array, 0, self.channels)
        if module in OUT:
            if leaf == "bias":  # is added once, not by everybody
                return array if self.wire.rank == 0 else mx.zeros_like(array)
            return self._part(name, array, -1)
        if module not in IN:
            return array
        axis = 0 if leaf == "bias" else -2
        if module in ("k_proj", "v_proj") and self.kv_heads < self.ranks:
            head = self.wire.rank * self.kv_heads // self.ranks
            return mx.contiguous(mx.split(array, self.kv_heads, axis=axis)[head])
        return self._part(name, array, axis, self.channels if module == "in_proj_qkv" else ())

    def fit(self, model: Model) -> Model:
        """The modules' own idea of their sizes, after their weights were cut."""
        for layer in model.weights.layers:
            if layer.is_linear:
                net = layer.linear_attn
                net.num_k_heads, net.num_v_heads = net.num_k_heads // self.ranks, net.num_v_heads // self.ranks
                net.key_dim, net.value_dim = net.key_dim // self.ranks, net.value_dim // self.ranks
                net.conv_dim, net.conv1d.groups = net.conv_dim // self.ranks, net.conv1d.groups // self.ranks
            else:
                attention = layer.self_attn
                attention.num_attention_heads //= self.ranks
                attention.num_key_value_heads = max(1, attention.num_key_value_heads // self.ranks)
        return replace(model, share=self)

    def take(self, x: mx.array) -> mx.array:
        return x

    def whole(self, part: mx.array) -> mx.array:
        return self.wire.sum(part)

    def give(self, x: mx.array) -> mx.array:
        return x

    def everywhere(self, here: bool) -> bool:
        return self.wire.everywhere(here)

    def _part(self, name: str, array: mx.array, axis: int, segments: Sequence[int] = ()) -> mx.array:
        """Of every segment along `axis` this machine's part."""
        ends = [sum(segments[: n + 1]) for n in range(len(segments) - 1)]
        parts = []
        for segment in mx.split(array, ends, axis=axis) if ends else [array]:
            if segment.shape[axis] % self.ranks:
                raise CheckpointError(
                    f"{name} is {array.shape}, which {self.ranks} machines cannot share alike: use --split pipeline, "
                    "or another number of machines"
                )
            parts.append(mx.split(segment, self.ranks, axis=axis)[self.wire.rank])
        return mx.contiguous(mx.concatenate(parts, axis=axis))
