"""Float8 releases: every parameter is what its codes and the scales of its blocks say."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from checkpoints import Arrays, write_shards
from families import write_family
from headstart.checkpoint import load_model

BLOCK = 128
# So that matrices have several blocks, the last of which are not whole.
LATENT = {"kv_lora_rank": 136, "q_lora_rank": 144, "qk_nope_head_dim": 40, "v_head_dim": 56}
INDEX = {"index_head_dim": 48, "index_n_heads": 3}
EXPERTS = {"hidden_size": 144, "intermediate_size": 176, "moe_intermediate_size": 136}
SIZES: dict[str, dict[str, Any]] = {
    "step3p7": EXPERTS | {"share_expert_dim": 136},
    "bailing_hybrid": EXPERTS | {"moe_shared_expert_intermediate_size": 136, "head_dim": 40, "kv_lora_rank": 136},
    "deepseek_v32": EXPERTS | LATENT | INDEX,
    "glm_moe_dsa": EXPERTS | LATENT | INDEX,
    "glm5_next": EXPERTS | LATENT | INDEX,
}
# What releases keep in half precision beside vectors, embeddings and output layers.
KEPT = (
    ".gate.",
    "_gate",
    "conv1d",
    "hc_",
    "_ape",
    "weights_proj",
    "eh_proj",
    "embed_tokens",
    "shared_head",
    "e_score",
)


def e4m3(codes: np.ndarray) -> np.ndarray:
    """The numbers of float8 codes: a sign, four bits of an exponent and three of a fraction."""
    sign, exponent, fraction = 1 - 2.0 * (codes >> 7), (codes >> 3 & 15).astype(np.float64), codes & 7
    return sign * np.where(exponent > 0, (1 + fraction / 8) * 2 ** (exponent - 7), fraction / 8 * 2.0**-6)


def as_float8(array: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Codes, scales of their blocks, and the float32 numbers that both are: of a matrix [..., N, K]."""
    *_, rows, columns = array.shape
    blocks = -(-rows // BLOCK), -(-columns // BLOCK)
    scales = np.random.default_rng(rows * columns).uniform(0.5, 2, (*array.shape[:-2], *blocks)).astype(np.float32)
    wide = np.repeat(np.repeat(scales, BLOCK, axis=-2), BLOCK, axis=-1)[..., :rows, :columns] / 256
    codes = mx.to_fp8(array.astype(mx.float32) / mx.array(wide))
    return codes, mx.array(scales / 256), mx.array((e4m3(np.array(codes)) * wide).astype(np.float32))


def write_both(folder: Path, family: str) -> tuple[Path, Path, int]:
    """A release in float8, another that holds the same numbers in float32, and how many matrices are in float8."""
    plain = write_family(folder / "plain", family, **SIZES[family])
    eight, numbers, count = Arrays(), Arrays(), 0
    for file in sorted(plain.glob("*.safetensors")):
        for name, array in mx.load(str(file)).items():
            matrix = array.ndim > 1 and ".layers." in name and not any(part in name for part in KEPT)
            if matrix:
                eight[name], eight[f"{name}_scale_inv"], numbers[name] = as_float8(array)
                count += 1
            else:
                eight[name] = numbers[name] = array
        file.unlink()
    (folder / "eight").mkdir()
    config = json.loads((plain / "config.json").read_text())
    method = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "eight" / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    write_shards(folder / "eight", eight, 2, {"format": "pt"})
    write_shards(plain, numbers, 2, {"format": "pt"})
    return folder / "eight", plain, count


@pytest.mark.parametrize("family", SIZES)
def test_every_parameter_is_what_codes_and_scales_say(family: str, tmp_path: Path) -> None:
    eight, plain, count = write_both(tmp_path, family)
    found, expected = (load_model(folder, dtype=mx.float32) for folder in (eight, plain))
    assert found.has_head
    assert expected.has_head
    theirs: Any = dict(tree_flatten(expected.weights.parameters()))
    ours: Any = dict(tree_flatten(found.weights.parameters()))
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert mx.array_equal(ours[name], array), name
    assert count > 20
    tokens = mx.array([[1, 2, 3, 4, 5]])
    assert mx.array_equal(*(model.trunk(tokens, model.make_state(1), certain=5) for model in (found, expected)))
