"""Checkpoints in nvfp4, mxfp4 and mxfp8 compute in one type throughout, whatever of them is quantised.

MLX's embedding of these modes is bfloat16, and no other part of a model says so: a type that is taken from it is not
the one that the weights were read in.
"""

from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model as load_mlx_lm_model

from checkpoints import requantize, write, write_drafter
from families import write_family
from fixtures import generate
from headstart.checkpoint import load_model
from headstart.engine.invariance import is_batch_invariant
from headstart.kernels import choose_backend
from headstart.kernels.cpu.backend import CpuBackend
from headstart.models import Model
from headstart.state import BatchState

MODES = ("nvfp4", "mxfp4", "mxfp8")
FAMILIES = ("dense", "moe", "llama")
PROMPT = [5, 17, 130, 9, 5, 17]
TOKENS = 16
M1 = {"memory_size": 8 * 10**9, "max_recommended_working_set_size": 5 * 10**9, "architecture": "applegpu_g13g"}


def write_mode(folder: Path, family: str, mode: str, *, embedding: bool, head: bool) -> Path:
    """Write a checkpoint whose embedding, and whose head (Llama's output matrix), are quantised or not."""
    keep = ("embed_tokens",) * (not embedding) + (("lm_head",) if family == "llama" else ("mtp.",)) * (not head)
    if family == "llama":
        write_family(folder, family)
    else:
        write(folder, family, "converted")
    return requantize(folder, mode, keep=keep)


class InFloat32(nn.Module):
    """An embedding with its output in float32."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.inner(tokens).astype(mx.float32)

    def as_linear(self, x: mx.array) -> mx.array:
        return self.inner.as_linear(x)


def mlx_lm_text(folder: Path) -> list[int]:
    """mlx-lm's own text, of the files as it reads them, in float32."""
    lm, _ = load_mlx_lm_model(folder)
    lm.set_dtype(mx.float32)
    inner: Any = lm.model if "model" in lm else lm.language_model.model
    inner.embed_tokens = InFloat32(inner.embed_tokens)
    return [int(token) for token, _ in generate_step(mx.array(PROMPT), lm, max_tokens=TOKENS)]


def kv_types(state: BatchState) -> set[mx.Dtype]:
    return {array.dtype for layer in state.kv_layers for array in layer.arrays()}


def types_of(model: Model) -> set[mx.Dtype]:
    """The types of everything that a prompt's pass makes: hidden states, logits, drafts and KV caches."""
    tokens, state = mx.array([PROMPT]), model.make_state(1)
    hidden = model.trunk(tokens, state, certain=len(PROMPT))
    found = {hidden.dtype, model.logits(hidden).dtype, model.embed(tokens).dtype} | kv_types(state)
    if model.has_head:
        memory = model.make_head_state(1)
        made = model.head(hidden, tokens, memory)
        found |= {made.dtype, model.draft_logits(made).dtype} | kv_types(memory)
    return found


def cases() -> list[Any]:
    found = []
    for case in product(FAMILIES, MODES, (True, False), (True, False)):
        quick = case[:2] == ("dense", "nvfp4") or case[2:] == (True, False)
        found.append(pytest.param(*case, marks=[] if quick else [pytest.mark.slow]))
    return found


@pytest.mark.parametrize(("family", "mode", "embedding", "head"), cases())
def test_text_is_mlx_lms_at_every_depth(tmp_path: Path, family: str, mode: str, embedding: bool, head: bool) -> None:
    folder = write_mode(tmp_path, family, mode, embedding=embedding, head=head)
    model = load_model(folder, dtype=mx.float32)
    assert types_of(model) == {model.dtype} == {mx.float32}
    assert ("scales" in model.weights.embed_tokens) == embedding
    plain, drafted = (generate(model, PROMPT, max_tokens=TOKENS, k=k) for k in (0, 3 if model.has_head else "auto"))
    assert drafted.tokens == plain.tokens == mlx_lm_text(folder)
    assert plain.stats is not None
    assert plain.stats.as_dict()["dtype"] == "float32"


@pytest.mark.skipif(not isinstance(choose_backend(), CpuBackend), reason="no CPU kernels here")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES[:2])
def test_kernels_compute_in_the_type_of_the_files(tmp_path: Path, family: str, mode: str) -> None:
    model = load_model(write_mode(tmp_path, family, mode, embedding=True, head=family == "moe"))
    assert model.dtype == mx.bfloat16
    assert model.backend.is_shown(model.layers, model.weights, model.dtype)  # router, experts, head and embedding too
    assert types_of(model) == {mx.bfloat16, mx.float32}  # logits are what was summed
    assert is_batch_invariant(model)
    assert generate(model, PROMPT, max_tokens=TOKENS, k=0).tokens == generate(model, PROMPT, max_tokens=TOKENS).tokens


def test_a_tied_embedding_and_a_drafter_compute_in_the_models_type(tmp_path: Path) -> None:
    folder = requantize(write(tmp_path / "model", "dense", "converted", tie=True), "nvfp4", keep=("mtp.",))
    model = load_model(folder, drafter=write_drafter(tmp_path / "drafter", folder), dtype=mx.float32)
    assert types_of(model) == {mx.float32}
    state = model.make_state(1)
    model.trunk(mx.array([PROMPT]), state, certain=len(PROMPT))
    state.commit(mx.array([len(PROMPT)]), most=len(PROMPT))
    assert {array.dtype for array in model.block_logits(mx.array([7]), 3, state)} == {mx.float32}
    texts = [generate(model, PROMPT, max_tokens=TOKENS, k=k).tokens for k in (0, 3)]
    assert texts == [mlx_lm_text(folder)] * 2


@pytest.mark.parametrize("mode", ["nvfp4", *(pytest.param(mode, marks=pytest.mark.slow) for mode in MODES[1:])])
def test_an_m1_computes_all_of_it_in_float16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    folder = write_mode(tmp_path, "dense", mode, embedding=True, head=False)
    with monkeypatch.context() as mac:
        mac.setattr(mx, "device_info", lambda *device: M1)
        mac.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
        model = load_model(folder)
    assert types_of(model) == {model.dtype} == {mx.float16}
    flat: Any = tree_flatten(model.weights.parameters())
    assert mx.bfloat16 not in {array.dtype for _, array in flat}
    plain, drafted = (generate(model, PROMPT, max_tokens=TOKENS, k=k) for k in (0, 3))
    assert drafted.tokens == plain.tokens
    assert len(plain.tokens) == TOKENS
