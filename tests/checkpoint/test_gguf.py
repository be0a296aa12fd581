"""GGUF files are the model that they were made from: its numbers to the bit, its tokenizer, its head."""

import json
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from gguf.quants import dequantize
from mlx_lm.utils import load_model as load_in_mlx_lm
from test_convert import converted

from checkpoints import write
from families import write_family
from fixtures import generate
from ggufs import HALVES, write_gguf
from headstart.checkpoint import load_model, load_tokenizer, read_layout, resolve
from headstart.checkpoint.blocks import TYPES, pack, unpack
from headstart.errors import CheckpointError
from headstart.kernels.weights import NVFP4_MOST
from headstart.models import Model

KINDS = [blocks.name for blocks in TYPES.values()]
LARGE = {"hidden_size": 256, "intermediate_size": 256}  # K-quants have blocks of 256


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.checkpoint.gguf_folder.cache_folder", lambda: tmp_path / "cache" / "kernels")


def write_release(folder: Path, family: str, **sizes: Any) -> Path:
    if family in ("dense", "moe"):
        return write(folder, family, "raw-per-expert", **sizes)
    return write_family(folder, family, **sizes, **({"mlp_only_layers": []} if family == "qwen3_moe" else {}))


def numbers(model: Model) -> dict[str, mx.array]:
    """Every parameter by its name; of quantised matrices the numbers that they stand for."""
    found: dict[str, Any] = {}
    for path, module in model.weights.named_modules():
        own = {name: a for name, a in module.items() if isinstance(a, mx.array)}
        if "scales" in own:
            parts = [own.pop("weight"), own.pop("scales"), own.pop("biases", None)]
            if parts[2] is not None:  # MLX computes in the type of affine scales
                parts[1:] = [each.astype(mx.float32) for each in parts[1:]]
            how = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
            whole = own.pop("global_scale", mx.array(NVFP4_MOST)) / NVFP4_MOST
            own["weight"] = mx.dequantize(*parts, **how, dtype=mx.float32) * whole[..., None, None]
        found |= {f"{path}.{name}": a for name, a in own.items()}
    return found


def assert_same_numbers(found: Model, expected: Model) -> None:
    ours, theirs = numbers(found), numbers(expected)
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        if name.endswith("A_log"):  # which the file has as -exp(A_log)
            assert mx.allclose(ours[name], array, rtol=0, atol=1e-6), name
        else:
            assert mx.array_equal(ours[name], array), name


# -- blocks


@pytest.mark.parametrize("kind", [name for name in KINDS if not name.endswith(("F16", "F32"))])
def test_blocks_are_the_numbers_that_ggufs_own_reader_makes_of_them(kind: str) -> None:
    blocks, stored = next(each for each in TYPES.values() if each.name == kind), gguf.GGMLQuantizationType[kind]
    assert gguf.GGML_QUANT_SIZES[stored] == (blocks.size, blocks.nbytes)
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 256, (8, 512 // blocks.size, blocks.nbytes), dtype=np.uint8)
    for at in HALVES.get(kind, (0, 2) if kind.endswith("_1") else (0,)):
        raw[..., at : at + 2] = rng.normal(size=(*raw.shape[:-1], 1)).astype(np.float16).view(np.uint8)
    if blocks.compute is not None:
        made = blocks.compute(mx.array(raw)).reshape(8, 512)
    else:
        assert blocks.repack is not None
        assert blocks.bits is not None
        codes, scales, biases = blocks.repack(mx.array(raw))
        assert scales.dtype == biases.dtype == blocks.dtype
        packed = pack(codes, blocks.bits)
        assert mx.array_equal(unpack(packed, blocks.bits), codes)
        widened = scales.astype(mx.float32), biases.astype(mx.float32)
        made = mx.dequantize(packed, *widened, group_size=32, bits=blocks.bits)
    assert np.array_equal(np.array(made), dequantize(raw.reshape(8, -1), stored))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_codes_are_packed_as_mlx_packs_them(bits: int) -> None:
    packed, scales, biases = mx.quantize(mx.random.normal((4, 128)), 32, bits)
    codes = unpack(packed, bits)
    assert mx.array_equal(pack(codes, bits), packed)
    grouped = mx.unflatten(codes.astype(mx.float32), -1, (-1, 32))
    made = (grouped * scales[..., None] + biases[..., None]).flatten(-2)
    assert mx.allclose(made, mx.dequantize(packed, scales, biases, 32, bits), atol=1e-6)


# -- models


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_is_read_to_the_bit(tmp_path: Path, kind: str) -> None:
    raw = write_release(tmp_path / "raw", "llama", **LARGE)
    file = write_gguf(tmp_path / "tiny.gguf", raw, kind)
    assert_same_numbers(load_model(file, dtype=mx.float32), load_model(raw, dtype=mx.float32))


@pytest.mark.parametrize("kind", ["Q4_0", pytest.param("Q5_K", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["dense", "moe", "llama", "qwen2", "qwen3", "qwen3_moe"])
def test_every_architecture_is_the_release(tmp_path: Path, family: str, kind: str) -> None:
    raw = write_release(tmp_path / "raw", family, **(LARGE if kind in HALVES else {}))
    file = write_gguf(tmp_path / "tiny.gguf", raw, kind)
    layout = read_layout(resolve(file))
    assert (layout.layout, layout.mtp.available) == ("gguf", family in ("dense", "moe"))
    found, expected = load_model(file, dtype=mx.float32), load_model(raw, dtype=mx.float32)
    assert_same_numbers(found, expected)
    assert found.config["max_position_embeddings"] == 4096
    prompt = [5, 17, 130, 9]
    assert generate(found, prompt, max_tokens=12).tokens == generate(expected, prompt, max_tokens=12).tokens


def test_value_heads_smaller_than_a_group_are_widened(tmp_path: Path) -> None:
    raw = write_release(tmp_path / "raw", "dense", linear_value_head_dim=16, linear_key_head_dim=16)
    file = write_gguf(tmp_path / "tiny.gguf", raw, "Q8_0")
    assert_same_numbers(load_model(file, dtype=mx.float32), load_model(raw, dtype=mx.float32))


@pytest.mark.parametrize("scaling", ["llama3", "linear", "yarn"])
def test_scaled_rotations_are_read(tmp_path: Path, scaling: str) -> None:
    rope: dict[str, Any] = {"rope_type": scaling, "factor": 8.0}
    if scaling == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    elif scaling == "yarn":
        rope["original_max_position_embeddings"] = 512
    raw = write_release(tmp_path / "raw", "llama", rope_scaling=rope, rope_theta=500000.0)
    file = write_gguf(tmp_path / "tiny.gguf", raw)
    found, expected = load_model(file, dtype=mx.float32), load_model(raw, dtype=mx.float32)
    assert found.config["rope_scaling"] == rope
    tokens = [mx.array([[7] * 40])] * 2
    logits = [m.score(t, m.make_state(1)).logits for m, t in zip((found, expected), tokens, strict=True)]
    assert mx.array_equal(*logits)


def test_a_split_file_is_one_model(tmp_path: Path) -> None:
    raw = write_release(tmp_path / "raw", "llama")
    whole = write_gguf(tmp_path / "tiny.gguf", raw, "Q8_0")
    reader, parts = gguf.GGUFReader(whole), []
    for number in (1, 2):
        parts.append(tmp_path / f"tiny-{number:05}-of-00002.gguf")
        writer = gguf.GGUFWriter(parts[-1], "llama")
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for name, field in reader.fields.items():
            if number == 1 and not name.startswith("GGUF.") and name != "general.architecture":
                kinds = field.types
                writer.add_key_value(name, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)
        for index, tensor in enumerate(reader.tensors):
            if index % 2 == number - 1:
                writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    assert_same_numbers(load_model(parts[0]), load_model(whole))
    with pytest.raises(CheckpointError, match=r"a part of a file that was split. Name the first, …-00001-of-00002"):
        resolve(parts[1])
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00002.gguf: the file is missing"):
        load_model(parts[0])


def test_the_only_file_of_a_folder_is_its_model(tmp_path: Path) -> None:
    raw = write_release(tmp_path / "raw", "llama")
    (tmp_path / "repo").mkdir()
    write_gguf(tmp_path / "repo" / "tiny.gguf", raw)
    (tmp_path / "repo" / "mmproj-tiny.gguf").touch()
    (tmp_path / "repo" / "config.json").write_text('{"model_type": "llama"}')
    assert read_layout(resolve(tmp_path / "repo")).layout == "gguf"
    (tmp_path / "repo" / "other.gguf").touch()
    with pytest.raises(CheckpointError, match=r"2 GGUF files of models\. Name one of them"):
        resolve(tmp_path / "repo")


def test_a_file_that_changes_is_read_anew(tmp_path: Path) -> None:
    raw = write_release(tmp_path / "raw", "llama")
    file = write_gguf(tmp_path / "tiny.gguf", raw)
    before = resolve(file)
    assert resolve(file) == before
    os.utime(file, ns=(1, 1))
    assert resolve(file) != before


# -- tokenizers


def test_the_tokenizer_and_the_template_are_those_of_the_release(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", vocab_size=8192)
    ours, theirs = load_tokenizer(resolve(write_gguf(tmp_path / "tiny.gguf", raw))), load_tokenizer(raw)
    for text in (
        "Hello, world!",
        "def f(x):\n    return x ** 2024",
        "<|im_start|>user\nÜber 12,5 €<|im_end|>",
        " \n\t  é",
    ):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text
    chat: Any = [{"role": "user", "content": "Hi"}]
    assert ours.apply_chat_template(chat, add_generation_prompt=True) == theirs.apply_chat_template(
        chat, add_generation_prompt=True
    )
    assert ours.eos_token_ids == {8185, 8187}  # <|endoftext|> by its name, as llama.cpp takes it


# -- conversion


@pytest.mark.parametrize(("family", "kind"), [("dense", "Q4_1"), ("llama", "Q4_K"), ("qwen3_moe", "Q8_0")])
def test_a_conversion_keeps_every_number(tmp_path: Path, family: str, kind: str) -> None:
    raw = write_release(tmp_path / "raw", family, **(LARGE if kind in HALVES else {}))
    file = write_gguf(tmp_path / "tiny.gguf", raw, kind)
    out = converted(resolve(file), tmp_path / "out", mx.float32)
    assert read_layout(out).layout == "converted"
    assert_same_numbers(load_model(out, dtype=mx.float32), load_model(file, dtype=mx.float32))
    assert load_tokenizer(out).vocab_size == load_tokenizer(resolve(file)).vocab_size
    theirs, _ = load_in_mlx_lm(out)
    theirs.set_dtype(mx.float32)
    tokens, model = mx.array([[5, 17, 130, 9]]), load_model(out, dtype=mx.float32)
    logits = model.score(tokens, model.make_state(1)).logits
    assert mx.abs(theirs(tokens) - logits).max() < 2e-2 * mx.abs(logits).max()


def test_matrices_with_more_bits_than_asked_for_are_quantised_again(tmp_path: Path) -> None:
    raw = write_release(tmp_path / "raw", "llama")
    file = write_gguf(tmp_path / "tiny.gguf", raw, "Q8_0")
    out = load_model(converted(resolve(file), tmp_path / "four", bits=4))
    assert {m.bits for _, m in out.weights.named_modules() if isinstance(m, nn.QuantizedLinear)} == {4}
    same = load_model(converted(resolve(file), tmp_path / "eight", mx.float32, bits=8), dtype=mx.float32)
    assert_same_numbers(same, load_model(file, dtype=mx.float32))
    other = read_layout(converted(resolve(file), tmp_path / "other", mode="mxfp8"))
    assert other.quantization == {"group_size": 32, "bits": 8, "mode": "mxfp8"}


def test_what_is_quantised_can_be_widened_first(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", write_release(tmp_path / "raw", "llama"), "Q4_0")
    wide = load_model(converted(resolve(file), tmp_path / "wide", mx.float32, dequantize=True), dtype=mx.float32)
    assert not any(isinstance(module, nn.QuantizedLinear) for _, module in wide.weights.named_modules())
    assert_same_numbers(wide, load_model(file, dtype=mx.float32))
    eight = read_layout(converted(resolve(file), tmp_path / "eight", bits=8, dequantize=True))
    assert eight.quantization == {"group_size": 64, "bits": 8, "mode": "affine"}


# -- bad files


def damaged(name: str, content: bytes) -> bytes:
    if name == "empty":
        return b""
    if name == "other magic":
        return b"GGML" + content[4:]
    if name == "version 1":
        return content[:4] + struct.pack("<I", 1) + content[8:]
    if name == "big endian":
        return content[:4] + struct.pack(">I", 3) + content[8:]
    if name == "tensors":
        return content[:8] + struct.pack("<Q", 2**60) + content[16:]
    if name == "fields":
        return content[:16] + struct.pack("<Q", 2**63) + content[24:]
    if name == "string":
        return content[:24] + struct.pack("<Q", 2**62) + content[32:]
    return content[: int(name.split()[-1]) * len(content) // 100]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", "it is too short"),
        ("other magic", "it does not begin with GGUF"),
        ("version 1", "version 1, where versions 2 and 3 are read"),
        ("big endian", "for big-endian machines"),
        ("tensors", "1152921504606846976 entries in the last"),
        ("fields", "9223372036854775808 entries in the last"),
        ("string", "a string of 4611686018427387904 bytes"),
        *((f"cut at {share}", "not a GGUF file, or truncated") for share in (1, 20, 60, 99)),
    ],
)
def test_a_damaged_file_is_one_line_and_leaves_nothing(tmp_path: Path, name: str, message: str) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", write_release(tmp_path / "raw", "llama"))
    file.write_bytes(damaged(name, file.read_bytes()))
    with pytest.raises(CheckpointError, match=message) as caught:
        resolve(file)
    assert str(file) in str(caught.value)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("seed", range(4))
def test_random_damage_is_an_error_or_no_matter(tmp_path: Path, seed: int) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", write_release(tmp_path / "raw", "llama"), "Q8_0")
    content, rng = file.read_bytes(), np.random.default_rng(seed)
    for number in range(25):
        changed = bytearray(content)
        for at in rng.integers(0, 30_000, 8):
            changed[at] = rng.integers(0, 256)
        file.with_stem(f"damaged-{number}").write_bytes(changed)
        with suppress(CheckpointError):
            read_layout(resolve(file.with_stem(f"damaged-{number}")))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"general.alignment": 7}, "general.alignment is 7, not a power of two"),
        ({"llama.rope.scaling.type": "longrope"}, "RoPE is scaled by longrope"),
        ({"llama.expert_count": 8}, "a mixture of experts of llama. Headstart reads GGUF files of llama, qwen2"),
        (
            {"llama.attention.key_length": 8, "llama.rope.dimension_count": 4},
            "rope.dimension_count is 4, and heads have",
        ),
    ],
)
def test_what_is_not_read_is_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", write_release(tmp_path / "raw", "llama"), **fields)
    with pytest.raises(CheckpointError, match=message):
        resolve(file)


def test_a_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 84), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q2_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"token_embd.weight is of GGUF's type Q2_K; Headstart reads F32, F16"):
        resolve(file)


def test_a_tensor_that_the_model_does_not_have_is_named(tmp_path: Path) -> None:
    raw = write_release(tmp_path / "raw", "qwen3")
    file = write_gguf(tmp_path / "tiny.gguf", raw)
    content = file.read_bytes().replace(b"blk.0.attn_k_norm.weight", b"blk.0.attn_x_norm.weight")
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"1 tensor missing \(layers.0.self_attn.k_norm.weight\)"):
        load_model(file)
    assert json.loads((resolve(file) / "config.json").read_text())["head_dim"] == 32
