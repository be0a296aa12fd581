"""The vision towers of Gemma 4. That of the 12B, which is unified with the text, has no blocks: a token is a patch of
48 x 48 pixels."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..images import GemmaRules
from ..kernels import Backend
from .vision import TokenId, TowerSpec, VisionTower, attend, attention_bytes, rotate

IMAGE, BEGIN, END = 258880, 255999, 258882  # tokens, where config.json does not name them


@dataclass(frozen=True)
class GemmaTowerShape:
    """The sizes in config.json's `vision_config`; transformers' defaults for what it leaves out."""

    depth: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head: int
    table: int  # position embeddings of each axis
    patch: int  # pixels
    pool: int  # patches by side that become one token
    eps: float
    base: float  # of RoPE
    clipped: bool  # the inputs and outputs of linear layers have limits
    standardize: bool

    @classmethod
    def of(cls, vision: dict[str, Any]) -> "GemmaTowerShape":
        rope = vision.get("rope_parameters") or {}
        return cls(
            depth=int(vision.get("num_hidden_layers", 16)),
            hidden=int(vision.get("hidden_size", 768)),
            intermediate=int(vision.get("intermediate_size", 3072)),
            heads=int(vision.get("num_attention_heads", 12)),
            kv_heads=int(vision.get("num_key_value_heads", 12)),
            head=int(vision.get("head_dim", 64)),
            table=int(vision.get("position_embedding_size", 10240)),
            patch=int(vision.get("patch_size", 16)),
            pool=int(vision.get("pooling_kernel_size", 3)),
            eps=float(vision.get("rms_norm_eps", 1e-6)),
            base=float(rope.get("rope_theta", 100.0)),
            clipped=bool(vision.get("use_clipped_linears", False)),
            standardize=bool(vision.get("standardize", False)),
        )


class ClippedLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int, clipped: bool):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        if clipped:
            self.input_min = self.output_min = mx.array(-mx.inf)
            self.input_max = self.output_max = mx.array(mx.inf)

    def run(self, backend: Backend, x: mx.array) -> mx.array:
        if "input_min" in self:
            x = mx.clip(x, self.input_min, self.input_max)
        x = backend.product(x, self.linear)
        return mx.clip(x, self.output_min, self.output_max) if "output_min" in self else x


class GemmaTowerAttention(nn.Module):
    def __init__(self, shape: GemmaTowerShape):
        super().__init__()
        queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
        self.q_proj = ClippedLinear(shape.hidden, queries, shape.clipped)
        self.k_proj = ClippedLinear(shape.hidden, keys, shape.clipped)
        self.v_proj = ClippedLinear(shape.hidden, keys, shape.clipped)
        self.o_proj = ClippedLinear(queries, shape.hidden, shape.clipped)
        self.q_norm = nn.RMSNorm(shape.head, shape.eps)
        self.k_norm = nn.RMSNorm(shape.head, shape.eps)


class GemmaTowerMLP(nn.Module):
    def __init__(self, shape: GemmaTowerShape):
        super().__init__()
        self.gate_proj = ClippedLinear(shape.hidden, shape.intermediate, shape.clipped)
        self.up_proj = ClippedLinear(shape.hidden, shape.intermediate, shape.clipped)
        self.down_proj = ClippedLinear(shape.intermediate, shape.hidden, shape.clipped)


class GemmaTowerBlock(nn.Module):
    def __init__(self, shape: GemmaTowerShape):
        super().__init__()
        self.self_attn = GemmaTowerAttention(shape)
        self.mlp = GemmaTowerMLP(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.pre_feedforward_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.post_feedforward_layernorm = nn.RMSNorm(shape.hidden, shape.eps)


class PatchEmbedder(nn.Module):
    def __init__(self, shape: GemmaTowerShape):
        super().__init__()
        self.input_proj = nn.Linear(3 * shape.patch**2, shape.hidden, bias=False)
        self.position_embedding_table = mx.zeros((2, shape.table, shape.hidden))  # of columns, then of rows


class GemmaTowerEncoder(nn.Module):
    def __init__(self, shape: GemmaTowerShape):
        super().__init__()
        self.layers = [GemmaTowerBlock(shape) for _ in range(shape.depth)]


class GemmaTowerBlocks(nn.Module):
    def __init__(self, shape: GemmaTowerShape):
        super().__init__()
        self.patch_embedder = PatchEmbedder(shape)
        self.encoder = GemmaTowerEncoder(shape)
        if shape.standardize:
            self.std_bias = mx.zeros((shape.hidden,))
            self.std_scale = mx.ones((shape.hidden,))


class Projector(nn.Module):
    def __init__(self, inputs: int, outputs: int, eps: float):
        super().__init__()
        self._eps = eps
        self.embedding_projection = nn.Linear(inputs, outputs, bias=False)

    def run(self, backend: Backend, x: mx.array) -> mx.array:
        return backend.product(mx.fast.rms_norm(x, None, self._eps), self.embedding_projection)


class GemmaImages(VisionTower[GemmaRules]):
    """What the towers have in common: how an image stands in a prompt."""

    def __init__(self, config: dict[str, Any], rules: GemmaRules):
        text = config["text_config"]
        spec = TowerSpec(
            int(config.get("image_token_id", IMAGE)),
            int(text["hidden_size"]),
            sees_whole=text.get("use_bidirectional_attention", "vision" if is_unified(config) else None) == "vision",
            looked_up=int(text.get("pad_token_id") or 0),
        )
        super().__init__(spec, rules)
        self._around = int(config.get("boi_token_id", BEGIN)), int(config.get("eoi_token_id", END))

    def spell(self, pixels: np.ndarray) -> list[int]:
        rows, columns = self.rules.grid(pixels)
        begin, end = self._around
        return [begin, *[self.spec.image_token] * (rows * columns), end]


class GemmaTower(GemmaImages):
    def __init__(self, config: dict[str, Any], rules: GemmaRules):
        super().__init__(config, rules)
        self._shape = shape = GemmaTowerShape.of(config["vision_config"])
        self.vision_tower = GemmaTowerBlocks(shape)
        self.embed_vision = Projector(shape.hidden, self.spec.out, shape.eps)

    @property
    def fits(self) -> bool:
        return (self.rules.patch, self.rules.pool) == (self._shape.patch, self._shape.pool)

    def count_patches(self, pixels: np.ndarray) -> int:
        rows, columns = self.rules.grid(pixels)
        return rows * columns * self._shape.pool**2

    def working_bytes(self, size: int) -> int:
        shape, patches = self._shape, self.rules.most * self._shape.pool**2
        return attention_bytes(patches, shape.heads, shape.hidden, max(shape.intermediate, shape.hidden), size)

    def run(self, backend: Backend, pixels: np.ndarray) -> Iterator[mx.array]:
        shape, embedder = self._shape, self.vision_tower.patch_embedder
        rows, columns = (shape.pool * side for side in self.rules.grid(pixels))
        patches = mx.array(2 * (self.rules.patches(pixels, shape.patch) - np.float32(0.5)))
        places = np.indices((rows, columns)).reshape(2, -1)[::-1]  # column and row of every patch, [2, N]
        x = backend.product(patches.astype(embedder.input_proj.weight.dtype), embedder.input_proj)
        across, down = (embedder.position_embedding_table[axis, mx.array(places[axis])] for axis in range(2))
        x = x + (across + down)
        frequencies = shape.base ** (-np.arange(shape.head // 4) / (shape.head // 4))
        angles = mx.array(places.T[..., None].astype(np.float32)) * mx.array(frequencies.astype(np.float32))
        turns = mx.cos(angles)[:, None], mx.sin(angles)[:, None]  # [N, 1, 2, D / 4]
        for block in self.vision_tower.encoder.layers:
            x = x + block.post_attention_layernorm(self._attend(backend, block, x, turns))
            x = x + block.post_feedforward_layernorm(_feed_forward(backend, block, x))
            yield x
        means = x.astype(mx.float32).reshape(rows // shape.pool, shape.pool, columns // shape.pool, shape.pool, -1)
        means = means.mean(axis=(1, 3)).reshape(-1, shape.hidden).astype(x.dtype)
        made = means.astype(mx.float32) * shape.hidden**0.5
        if shape.standardize:
            made = (made - self.vision_tower.std_bias.astype(mx.float32)) * self.vision_tower.std_scale
        yield self.embed_vision.run(backend, made.astype(x.dtype))

    def _attend(
        self, backend: Backend, block: GemmaTowerBlock, x: mx.array, turns: tuple[mx.array, mx.array]
    ) -> mx.array:
        part, shape, x = block.self_attn, self._shape, block.input_layernorm(x)
        projections = part.q_proj, part.k_proj, part.v_proj
        queries, keys, values = (each.run(backend, x).reshape(x.shape[0], -1, shape.head) for each in projections)
        queries, keys = part.q_norm(queries), part.k_norm(keys)
        values = mx.fast.rms_norm(values, None, shape.eps)
        # Half of a head turns by the column, the other by the row.
        queries, keys = (rotate(a.reshape(*a.shape[:2], 2, -1), *turns).reshape(a.shape) for a in (queries, keys))
        queries, keys, values = (a.swapaxes(0, 1)[None] for a in (queries, keys, values))  # [1, H, N, D]
        return part.o_proj.run(backend, attend(queries, keys, values, 1.0))


def _feed_forward(backend: Backend, block: GemmaTowerBlock, x: mx.array) -> mx.array:
    part, x = block.mlp, block.pre_feedforward_layernorm(x)
    gate, up = (each.run(backend, x) for each in (part.gate_proj, part.up_proj))
    return part.down_proj.run(backend, nn.gelu_approx(gate) * up)


class VisionEmbedder(nn.Module):
    def __init__(self, patch: int, hidden: int, table: int):
        super().__init__()
        self.patch_ln1 = nn.LayerNorm(patch)
        self.patch_dense = nn.Linear(patch, hidden)
        self.patch_ln2 = nn.LayerNorm(hidden)
        self.pos_embedding = mx.zeros((table, 2, hidden))  # of columns and of rows
        self.pos_norm = nn.LayerNorm(hidden)


class UnifiedTower(GemmaImages):
    def __init__(self, config: dict[str, Any], rules: GemmaRules):
        super().__init__(config, rules)
        vision = config["vision_config"]
        self._sides = int(vision.get("patch_size", 16)), int(vision.get("pooling_kernel_size", 3))
        patch, hidden = self._sides[0] * self._sides[1], int(vision.get("mm_embed_dim", 3840))
        self.vision_embedder = VisionEmbedder(3 * patch**2, hidden, int(vision.get("mm_posemb_size", 1120)))
        self.embed_vision = Projector(hidden, self.spec.out, float(vision.get("rms_norm_eps", 1e-6)))

    @property
    def fits(self) -> bool:
        return (self.rules.patch, self.rules.pool) == self._sides

    def count_patches(self, pixels: np.ndarray) -> int:
        rows, columns = self.rules.grid(pixels)
        return rows * columns

    def working_bytes(self, size: int) -> int:
        return 4 * self.rules.most * max(self.vision_embedder.patch_dense.weight.shape) * size

    def run(self, backend: Backend, pixels: np.ndarray) -> Iterator[mx.array]:
        part, dtype = self.vision_embedder, self.vision_embedder.patch_dense.weight.dtype
        patches = mx.array(self.rules.patches(pixels, self._sides[0] * self._sides[1])).astype(dtype)
        x = part.patch_ln2(backend.product(part.patch_ln1(patches), part.patch_dense))
        rows, columns = (mx.array(each.reshape(-1)) for each in np.indices(self.rules.grid(pixels)))
        x = part.pos_norm(x + (part.pos_embedding[columns, 0] + part.pos_embedding[rows, 1]))
        yield self.embed_vision.run(backend, x)


def is_unified(config: dict[str, Any]) -> bool:
    return str(config["model_type"]).startswith("gemma4_unified")


def make_tower(config: dict[str, Any], rules: GemmaRules, _: TokenId) -> VisionTower[GemmaRules]:
    return UnifiedTower(config, rules) if is_unified(config) else GemmaTower(config, rules)
