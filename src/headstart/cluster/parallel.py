"""How ranks divide the trunk: tensor parallel (a part of every layer each) or pipeline parallel (some layers each).

Every rank verifies the drafts for itself and commits accepted tokens to its own part of the state, so no state is
ever sent. Norms, routers, the embedding and the multi-token-prediction head are whole on every rank, so drafting
needs no messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError
from ..kernels.share import Alone
from ..models import Model
from .communicator import Communicator

SPLIT_OUTPUTS = {
    "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj",
    "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba",
}  # fmt: skip
SPLIT_INPUTS = {"o_proj", "down_proj", "out_proj"}
BY_VALUE_HEAD = {"A_log", "dt_bias"}

# Of config.json's text part. Key-value heads are checked apart: one may be on several machines.
DIVIDED = (
    "num_attention_heads", "linear_num_key_heads", "linear_num_value_heads",
    "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class ParallelTrunk(Alone):
    """One rank's part of the trunk."""

    comm: Communicator

    @property
    def ranks(self) -> int:  # type: ignore[override]
        return self.comm.ranks

    def everywhere(self, here: bool) -> bool:
        return self.comm.everywhere(here)

    def holds(self, name: str) -> bool:
        """Return whether this rank loads the parameter `name`."""
        return True

    def cut(self, name: str, array: mx.array) -> mx.array:
        """Return this rank's part of the parameter `name`."""
        return array


@dataclass(frozen=True, eq=False)
class TensorParallel(ParallelTrunk):
    """Attention and GatedDeltaNet are divided by heads, MLPs and experts by hidden units.

    Projections into them are divided by outputs, projections back by inputs, so each half of a layer ends in one sum
    over the ranks.
    """

    channels: tuple[int, ...]  # of the convolution: queries, keys, values
    kv_heads: int

    @classmethod
    def of(cls, config: dict[str, Any], comm: Communicator) -> "TensorParallel":
        """Divide the model that config.json's text part describes."""
        ranks, kv_heads = comm.ranks, int(config["num_key_value_heads"])
        experts = bool(config.get("num_experts"))
        names = [name for name in DIVIDED if config.get(name) and not (experts and name == "intermediate_size")]
        wrong = [name for name in names if config[name] % ranks]
        if kv_heads % ranks and ranks % kv_heads:
            wrong.append("num_key_value_heads")
        if wrong:
            raise _indivisible(f"config.json: {wrong[0]} is {config[wrong[0]]}", ranks)
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        return cls(comm, (keys, keys, values), kv_heads)

    def cut(self, name: str, array: mx.array) -> mx.array:
        """Return this rank's part. Quantised weights, their scales and biases are cut alike."""
        *path, module, leaf = name.split(".")
        if path[:1] != ["layers"]:
            return array
        if leaf in BY_VALUE_HEAD:
            return self._part(name, array, 0)
        if module == "conv1d":
            return self._part(name, array, 0, self.channels)
        if module in SPLIT_INPUTS:
            if leaf == "bias":  # must be added once, not by every rank
                return array if self.comm.rank == 0 else mx.zeros_like(array)
            return self._part(name, array, -1)
        if module not in SPLIT_OUTPUTS:
            return array
        axis = 0 if leaf == "bias" else -2
        if module in ("k_proj", "v_proj") and self.kv_heads < self.ranks:
            head = self.comm.rank * self.kv_heads // self.ranks
            return mx.contiguous(mx.split(array, self.kv_heads, axis=axis)[head])
        return self._part(name, array, axis, self.channels if module == "in_proj_qkv" else ())

    def fit(self, model: Model) -> Model:
        """Return the model with its modules' sizes divided, like their weights."""
        for layer in model.weights.layers:
            if layer.is_linear:
                net = layer.linear_attn
                for name in ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim"):
                    setattr(net, name, getattr(net, name) // self.ranks)
                net.conv1d.groups //= self.ranks
            else:
                attention = layer.self_attn
                attention.num_attention_heads //= self.ranks
                attention.num_key_value_heads = max(1, attention.num_key_value_heads // self.ranks)
        return replace(model, share=self)

    def whole(self, part: mx.array) -> mx.array:
        return self.comm.sum(part)

    def _part(self, name: str, array: mx.array, axis: int, segments: Sequence[int] = ()) -> mx.array:
        """Return this rank's part of every segment along `axis`."""
        ends = [sum(segments[: n + 1]) for n in range(len(segments) - 1)]
        parts = []
        for segment in mx.split(array, ends, axis=axis) if ends else [array]:
            if segment.shape[axis] % self.ranks:
                raise _indivisible(f"{name} is {array.shape}", self.ranks)
            parts.append(mx.split(segment, self.ranks, axis=axis)[self.comm.rank])
        return mx.contiguous(mx.concatenate(parts, axis=axis))


@dataclass(frozen=True, eq=False)
class PipelineParallel(ParallelTrunk):
    """Each rank has consecutive layers. A window goes from rank to rank, and the last one's output to all."""

    begin: int  # first layer on this rank
    end: int
    layers: int  # of all ranks

    @classmethod
    def of(cls, config: dict[str, Any], comm: Communicator) -> "PipelineParallel":
        """Divide the model that config.json's text part describes; the first ranks may have one layer more."""
        layers = int(config["num_hidden_layers"])
        if layers < comm.ranks:
            raise CheckpointError(
                f"config.json: num_hidden_layers is {layers}, too few for {comm.ranks} machines: use fewer"
            )
        each, more = divmod(layers, comm.ranks)
        begin = comm.rank * each + min(comm.rank, more)
        end = begin + each + (comm.rank < more)
        return cls(comm, begin, end, layers)

    @property
    def ends(self) -> bool:  # type: ignore[override]
        return self.end == self.layers

    def holds(self, name: str) -> bool:
        stack, layer, *_ = name.split(".")
        return stack != "layers" or self.begin <= int(layer) < self.end

    def fit(self, model: Model) -> Model:
        """Return the model with the layers of this rank."""
        model.weights.layers = model.weights.layers[self.begin : self.end]
        return replace(model, share=self)

    def take(self, x: mx.array) -> mx.array:
        return x if self.begin == 0 else self.comm.receive(x, self.comm.rank - 1)

    def give(self, x: mx.array) -> mx.array:
        if not self.ends:
            x = self.comm.send(x, self.comm.rank + 1)
        output = self.comm.gather(x)[-1]
        # All ranks must send their messages in the same order, and even if this rank does not use the output.
        mx.async_eval(output)
        return output


def _indivisible(what: str, ranks: int) -> CheckpointError:
    return CheckpointError(
        f"{what}, which cannot be divided evenly among {ranks} machines: use --split pipeline, or another number of "
        "machines"
    )
