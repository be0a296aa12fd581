"""One model, whatever layout it was stored in; and types that the device can compute with."""

from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from checkpoints import FAMILIES, write
from headstart.checkpoint import Needs, load, load_model, load_tokenizer, read_layout, resolve
from headstart.checkpoint.load import compute_dtype
from headstart.errors import CheckpointError, HeadstartError
from headstart.kernels import Backend, choose_backend
from headstart.kernels.cpu.backend import CpuBackend, StockCpu
from headstart.kernels.metal.stock import StockMetal
from headstart.models import Model
from headstart.models.memory import SHARE, Footprint

SAME_MODEL = [
    ("dense", "converted", {}),
    ("dense", "raw", {"shards": 7}),
    ("dense", "sidecar", {"sidecar": "mtp.safetensors"}),
    ("dense", "sidecar", {"sidecar": "model-mtp.safetensors"}),
    ("dense", "sidecar", {"sidecar": "mtp/weights.safetensors"}),
    ("dense", "raw-sidecar", {}),
    *((family, layout, {}) for family in ("moe", "next") for layout in ("raw-fused", "raw-per-expert")),
    ("moe", "raw-per-expert", {"shards": 5}),
    ("moe", "converted", {}),
    ("next", "sidecar", {}),
    ("moe", "raw-sidecar", {}),
    pytest.param("next", "raw-per-expert", {"shards": 5}, marks=pytest.mark.slow),
    pytest.param("next", "converted", {}, marks=pytest.mark.slow),
    pytest.param("moe", "sidecar", {}, marks=pytest.mark.slow),
    pytest.param("next", "raw-sidecar", {}, marks=pytest.mark.slow),
]


def arrays_of(model: Model) -> dict[str, mx.array]:
    flat: Any = tree_flatten(model.weights.parameters())
    return dict(flat)


def greedy(model: Model, count: int = 5) -> list[tuple[int, int]]:
    """Token and draft at each step, without a cache."""
    tokens, out = [5, 17, 130], []
    for _ in range(count):
        hidden = model.trunk(mx.array([tokens]), model.make_state(1), certain=len(tokens))
        tokens.append(int(mx.argmax(model.logits(hidden)[0, -1])))
        draft = -1
        if model.has_head:
            made = model.head(hidden, mx.array([tokens[1:]]), model.make_head_state(1))
            draft = int(mx.argmax(model.draft_logits(made)[0, -1]))
        out.append((tokens[-1], draft))
    return out


def assert_same(one: Model, other: Model) -> None:
    expected, found = arrays_of(one), arrays_of(other)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert mx.array_equal(found[name], array), name
    assert greedy(other) == greedy(one)


@pytest.mark.parametrize(("family", "layout", "options"), SAME_MODEL)
def test_every_layout_holds_the_same_model(tmp_path: Path, family: str, layout: str, options: dict[str, Any]) -> None:
    raw = load_model(write(tmp_path / "raw", family))
    assert_same(raw, load_model(write(tmp_path / "other", family, layout, **options)))
    assert len({token for token, _ in greedy(raw)}) > 3


def test_experts_are_stacked_by_number_not_by_name(tmp_path: Path) -> None:
    per_expert = load_model(write(tmp_path / "raw", "moe", "raw-per-expert", num_experts=12))  # 10 sorts before 2
    assert_same(per_expert, load_model(write(tmp_path / "converted", "moe", "converted", num_experts=12)))


@pytest.mark.parametrize(
    ("family", "bits"),
    [
        *(("dense", bits) for bits in (3, 8)),
        ("moe", 4),
        *(pytest.param("dense", bits, marks=pytest.mark.slow) for bits in (2, 4, 5, 6)),
        pytest.param("next", 4, marks=pytest.mark.slow),
    ],
)
def test_quantised_layouts_hold_the_same_model(tmp_path: Path, family: str, bits: int) -> None:
    kept = load_model(write(tmp_path / "kept", family, "converted", bits=bits))
    assert_same(kept, load_model(write(tmp_path / "sidecar", family, "sidecar", bits=bits)))
    assert_same(kept, load_model(write(tmp_path / "raw", family, "raw-sidecar", bits=bits)))
    assert "scales" in kept.weights.layers[3].self_attn.q_proj
    assert "scales" not in kept.weights.mtp.layers[0].self_attn.q_proj


@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantised_model_holds_the_codes_of_the_file_and_close_weights(tmp_path: Path, family: str) -> None:
    plain = load_model(write(tmp_path / "plain", family, "converted"))
    packed = load_model(write(tmp_path / "packed", family, "converted", bits=8, head_bits=8))
    for name, module in packed.weights.named_modules():
        if "scales" not in module:
            continue
        weight = mx.dequantize(
            module.weight, module.scales, module.biases, group_size=module.group_size, bits=module.bits
        )
        expected = arrays_of(plain)[f"{name}.weight"]
        assert mx.allclose(weight, expected, atol=0.02 * float(mx.abs(expected).max())), name
    assert "scales" in packed.weights.mtp.layers[0].self_attn.q_proj
    assert "scales" not in packed.weights.mtp.fc
    files = [mx.load(str(path)) for path in (tmp_path / "packed").glob("*.safetensors")]
    stored: Any = {name: array for file in files for name, array in file.items()}
    prefix = "model." if family == "next" else "language_model.model."
    assert mx.array_equal(stored[f"{prefix}embed_tokens.weight"], packed.weights.embed_tokens.weight)
    assert packed.weights.embed_tokens is packed.family.text(packed.lm).embed_tokens  # mlx-lm's own, too


def test_norms_are_shifted_once_and_kept_in_float32(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", "dense")
    shards: Any = [mx.load(str(path)) for path in raw.glob("*.safetensors")]
    stored = {name: array for shard in shards for name, array in shard.items()}
    for layout in ("raw", "converted"):
        found = arrays_of(load_model(write(tmp_path / layout, "dense", layout)))
        for name in ("layers.0.input_layernorm", "layers.3.self_attn.q_norm", "norm"):
            expected = stored[f"model.language_model.{name}.weight"].astype(mx.float32) + 1
            assert found[f"{name}.weight"].dtype == mx.float32
            assert mx.array_equal(found[f"{name}.weight"], expected), name
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "layers.0.self_attn.k_norm"):
            expected = stored[f"mtp.{name}.weight"].astype(mx.float32) + 1
            assert mx.array_equal(found[f"mtp.{name}.weight"], expected), name
        gated = "layers.0.linear_attn.norm.weight"
        assert mx.array_equal(found[gated], stored[f"model.language_model.{gated}"]), "it is not zero-centred"


def test_float8_blocks_are_scaled_each_by_its_own(tmp_path: Path) -> None:
    """Blocks of 128, the last of them partial."""
    folder = write(tmp_path, "moe", "fp8", moe_intermediate_size=160, hidden_size=192)
    found = arrays_of(load_model(folder, dtype=mx.float32))
    shards: Any = [mx.load(str(path)) for path in folder.glob("*.safetensors")]
    stored = {name: array for shard in shards for name, array in shard.items()}
    for layer in ("model.language_model.layers.1", "mtp.layers.0"):
        name = f"{layer}.mlp.experts.5.up_proj.weight"
        codes = np.array(mx.from_fp8(stored[name], dtype=mx.float32))
        scales = np.array(stored[f"{name}_scale_inv"].astype(mx.float32))
        assert (codes.shape, scales.shape) == ((160, 192), (2, 2))
        for i in range(160):
            codes[i] *= np.repeat(scales[i // 128], 128)[:192]
        stacked = found[f"{layer.removeprefix('model.language_model.')}.mlp.switch_mlp.up_proj.weight"]
        assert np.array_equal(np.array(stacked[5]), codes)


def test_tied_embeddings_are_one_array(tmp_path: Path) -> None:
    model = load_model(write(tmp_path, "moe", tie=True))
    assert "lm_head" not in model.weights
    assert_same(model, load_model(write(tmp_path / "converted", "moe", "converted", tie=True)))


@pytest.mark.parametrize(
    ("stored", "experts", "modes", "expected"),
    [
        ("bfloat16", False, set(), mx.bfloat16),
        ("float16", False, set(), mx.float16),
        ("bfloat16", True, set(), mx.float32),
        ("bfloat16", False, {"affine"}, mx.float32),
        ("float16", True, {"affine"}, mx.float32),
    ],
)
def test_stock_ops_on_cpu_keep_the_type_of_dense_unquantised_models_only(
    stored: str, experts: bool, modes: set[str], expected: mx.Dtype
) -> None:
    assert compute_dtype(StockCpu(), stored, experts, modes) == expected
    assert compute_dtype(Backend(), stored, experts, modes) == getattr(mx, stored)


def test_native_kernels_keep_the_type_that_they_take() -> None:
    backend = choose_backend()
    if not isinstance(backend, CpuBackend):
        pytest.skip("needs the native CPU kernels")
    assert compute_dtype(backend, "bfloat16", True, {"affine"}) == mx.bfloat16
    assert compute_dtype(backend, "float16", True, {"affine"}) == mx.float32
    assert compute_dtype(backend, "bfloat16", False, {"affine", "mxfp4", "mxfp8", "nvfp4"}) == mx.bfloat16


def test_the_type_can_be_chosen(tmp_path: Path) -> None:
    folder = write(tmp_path, "dense", "converted", bits=4)
    model = load_model(folder, dtype=mx.float16)
    assert {str(a.dtype) for n, a in arrays_of(model).items() if n.endswith((".scales", "fc.weight"))} == {
        "mlx.core.float16"
    }
    assert model.weights.norm.weight.dtype == mx.float32
    assert model.weights.layers[0].linear_attn.A_log.dtype == mx.float32


def test_a_model_that_memory_does_not_hold_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "large", "dense")
    request = Footprint.of(load.LoadPlan.of(folder).model).bytes([1])
    size = read_layout(folder).bytes + int(request / SHARE)
    monkeypatch.setattr("headstart.models.memory.unused", lambda: size - 1)
    with pytest.raises(CheckpointError, match=r"large: its weights take 0\.\d+ GB, and 0\.\d+ GB .* are left"):
        load_model(folder)
    assert not load_model(folder, mtp=False).has_head  # which is smaller
    monkeypatch.setattr("headstart.models.memory.unused", lambda: size)
    assert load_model(folder).has_head


def test_float8_weights_are_counted_as_they_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "eight", "moe", "fp8", moe_intermediate_size=160, hidden_size=192)
    checked: list[int] = []
    monkeypatch.setattr(load, "_check_memory", lambda path, needs, _: checked.append(needs.weights))
    model = load_model(folder, dtype=mx.bfloat16)
    assert checked[0] == pytest.approx(sum(array.nbytes for array in arrays_of(model).values()), rel=0.01)
    assert checked[0] > 1.5 * read_layout(folder).bytes


GB = 10**9
MACS = {  # what Metal reports: memory, what it lets a GPU use of it, architecture
    "M1, 8 GB": {"memory_size": 8 * GB, "max_recommended_working_set_size": 5 * GB, "architecture": "applegpu_g13g"},
    "M2 Ultra": {
        "memory_size": 99 * GB,
        "max_recommended_working_set_size": 75 * GB,
        "architecture": "applegpu_g14d",
    },
    "M3 Max": {"memory_size": 36 * GB, "max_recommended_working_set_size": 28 * GB, "architecture": "applegpu_g15s"},
    "M4": {"memory_size": 16 * GB, "max_recommended_working_set_size": 12 * GB, "architecture": "applegpu_g16g"},
    "M5": {"memory_size": 32 * GB, "max_recommended_working_set_size": 24 * GB, "architecture": "applegpu_g17g"},
}


@pytest.mark.parametrize(("mac", "fits"), [("M1, 8 GB", False), ("M4", False), ("M5", True), ("M2 Ultra", True)])
def test_a_mac_refuses_weights_that_leave_the_system_too_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mac: str, fits: bool
) -> None:
    """A model of 15 GB, such as 27B in 4 bits."""
    monkeypatch.setattr(mx, "device_info", lambda *device: MACS[mac])
    monkeypatch.setattr(mx, "get_active_memory", lambda: 0)
    check = partial(load._check_memory, tmp_path, Needs(15 * GB, GB // 100))
    if fits:
        check()
        return
    with pytest.raises(CheckpointError) as refused:
        check()
    working, total = MACS[mac]["max_recommended_working_set_size"] / 1e9, MACS[mac]["memory_size"] / 1e9
    for part in (
        "weights take 15.00 GB",
        f"{working:.2f} GB of this device's memory are left",
        f"macOS lets a GPU use {working:.2f} of this machine's {total:.2f} GB",
        "a short request takes 0.01 GB more",
        "set HEADSTART_MEMORY_GB to the gigabytes",
    ):
        assert part in str(refused.value)
    monkeypatch.setenv("HEADSTART_MEMORY_GB", "15.5")  # by those who know better
    check()
    monkeypatch.setenv("HEADSTART_MEMORY_GB", "14.5")
    with pytest.raises(CheckpointError, match=r"and 14\.50 GB of this device's memory are left; a short"):
        check()
    for wrong in ("-1", "much"):
        monkeypatch.setenv("HEADSTART_MEMORY_GB", wrong)
        with pytest.raises(HeadstartError, match=f"HEADSTART_MEMORY_GB is '{wrong}'"):
            check()


@pytest.mark.parametrize(
    ("mac", "expected"),
    [
        ("M1, 8 GB", "float16"),
        ("M2 Ultra", "float16"),
        ("M3 Max", "bfloat16"),
        ("M4", "bfloat16"),
        ("M5", "bfloat16"),
    ],
)
def test_chips_without_bfloat16_compute_in_float16(monkeypatch: pytest.MonkeyPatch, mac: str, expected: str) -> None:
    monkeypatch.setattr(mx, "device_info", lambda *device: MACS[mac])
    backend = StockMetal()
    for packed in (False, True):
        modes = {"affine"} if packed else set()
        assert compute_dtype(backend, "bfloat16", packed, modes) == getattr(mx, expected)
        assert compute_dtype(backend, "float32", packed, modes) == mx.float32
        assert compute_dtype(backend, "float16", packed, modes) == mx.float16
    monkeypatch.setenv("HEADSTART_DTYPE", "bfloat16")
    assert compute_dtype(backend, "float16", False, set()) == mx.bfloat16
    monkeypatch.setenv("HEADSTART_DTYPE", "int4")
    with pytest.raises(
        CheckpointError, match="HEADSTART_DTYPE is 'int4'; set it to one of bfloat16, float16, float32"
    ):
        compute_dtype(backend, "float16", False, set())


def test_a_model_can_be_loaded_without_its_head(tmp_path: Path) -> None:
    model = load_model(write(tmp_path, "moe"), mtp=False)
    assert not model.has_head
    assert model.head_unavailable == "loaded without the head"
    assert load_model(tmp_path).head_unavailable is None


def test_the_builtin_model_is_the_default_and_writes_python() -> None:
    model, tokenizer = load_model(), load_tokenizer(resolve())
    tokens = tokenizer.encode("def add(a, b):\n    return a")
    for _ in range(3):
        hidden = model.trunk(mx.array([tokens]), model.make_state(1), certain=len(tokens))
        tokens.append(int(mx.argmax(model.logits(hidden)[0, -1])))
    assert tokenizer.decode(tokens).startswith("def add(a, b):\n    return a + b")
    assert tokenizer.eos_token_ids == {8185, 8187}  # generation_config.json's
