"""`gated_delta._chunk_by_chunk` on a GPU: one program for each row and head, the state in registers.

In Triton, which PyTorch brings along for CUDA. The twin in plain PyTorch starts some ten kernels a chunk, and twice
that for the gradients.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _forwards(  # type: ignore[no-untyped-def]
    VALUES, KEYS, ASKED, INSIDE, LEFT, KEPT, SAID, NEW, STATES, chunks, C: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    c, d = tl.arange(0, C), tl.arange(0, D)
    cd, cc = c[:, None] * D + d[None, :], c[:, None] * C + c[None, :]
    dc, dd = d[:, None] * C + c[None, :], d[:, None] * D + d[None, :]
    kind = VALUES.dtype.element_ty
    state = tl.zeros((D, D), dtype=tl.float32)
    for n in range(chunks):
        at = head * chunks + n
        before = state.to(kind)
        tl.store(STATES + at * D * D + dd, before)
        keys = tl.load(KEYS + at * C * D + cd)
        new = (tl.load(VALUES + at * C * D + cd).to(tl.float32) - tl.dot(keys, before)).to(kind)
        tl.store(NEW + at * C * D + cd, new)
        said = tl.dot(tl.load(ASKED + at * C * D + cd), before) + tl.dot(tl.load(INSIDE + at * C * C + cc), new)
        tl.store(SAID + at * C * D + cd, said.to(kind))
        state = state * tl.load(KEPT + at) + tl.dot(tl.load(LEFT + at * C * D + dc), new)


@triton.jit
def _backwards(  # type: ignore[no-untyped-def]
    SAID, KEYS, ASKED, INSIDE, LEFT, KEPT, NEW, STATES,
    D_VALUES, D_KEYS, D_ASKED, D_INSIDE, D_LEFT, D_KEPT, chunks, C: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """SAID and whatever begins with D_ are gradients. The state's comes from the chunks after this one."""
    head = tl.program_id(0).to(tl.int64)
    c, d = tl.arange(0, C), tl.arange(0, D)
    cd, cc = c[:, None] * D + d[None, :], c[:, None] * C + c[None, :]
    dc, dd = d[:, None] * C + c[None, :], d[:, None] * D + d[None, :]
    kind = KEYS.dtype.element_ty
    after = tl.zeros((D, D), dtype=tl.float32)
    for n in range(chunks):
        at = head * chunks + chunks - 1 - n
        said, after_ = tl.load(SAID + at * C * D + cd), after.to(kind)
        left, new = tl.load(LEFT + at * C * D + dc), tl.load(NEW + at * C * D + cd)
        d_new = tl.dot(tl.trans(tl.load(INSIDE + at * C * C + cc)), said) + tl.dot(tl.trans(left), after_)
        d_new_ = d_new.to(kind)
        tl.store(D_VALUES + at * C * D + cd, d_new_)
        tl.store(D_LEFT + at * C * D + dc, tl.dot(after_, tl.trans(new)).to(kind))
        tl.store(D_INSIDE + at * C * C + cc, tl.dot(said, tl.trans(new)).to(kind))
        before = tl.load(STATES + at * D * D + dd)
        tl.store(D_KEPT + at, tl.sum(tl.sum(before.to(tl.float32) * after, 0), 0))
        tl.store(D_ASKED + at * C * D + cd, tl.dot(said, tl.trans(before)).to(kind))
        tl.store(D_KEYS + at * C * D + cd, (-tl.dot(d_new_, tl.trans(before))).to(kind))
        asked, keys = tl.load(ASKED + at * C * D + cd), tl.load(KEYS + at * C * D + cd)
        after = after * tl.load(KEPT + at) + tl.dot(tl.trans(asked), said) - tl.dot(tl.trans(keys), d_new_)


@torch.library.custom_op("headstart::scan", mutates_args=())
def _scan(
    values: Tensor, keys: Tensor, asked: Tensor, inside: Tensor, left: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    parts = [part.contiguous() for part in (values, keys, asked, inside, left, kept)]
    rows, heads, chunks, size, dim = values.shape
    made = said, new, states = _room(values)
    _forwards[(rows * heads,)](*parts, said, new, states, chunks, C=size, D=dim, num_warps=4, num_stages=2)
    return made


@_scan.register_fake
def _(values: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _room(values)


def _room(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For what is said, for what is new in every chunk, and for the state before it."""
    *ahead, _, dim = values.shape
    return values.new_empty(values.shape), values.new_empty(values.shape), values.new_empty(*ahead, dim, dim)


@torch.library.custom_op("headstart::scan_back", mutates_args=())
def _scan_back(
    said: Tensor, keys: Tensor, asked: Tensor, inside: Tensor, left: Tensor, kept: Tensor, new: Tensor, states: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    parts = [part.contiguous() for part in (said, keys, asked, inside, left, kept, new, states)]
    rows, heads, chunks, size, dim = keys.shape
    made = tuple(torch.empty_like(part) for part in parts[:6])
    _backwards[(rows * heads,)](*parts, *made, chunks, C=size, D=dim, num_warps=4, num_stages=1)
    return made


@_scan_back.register_fake
def _(said: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    return tuple(part.new_empty(part.shape) for part in (said, *others[:5]))


def _remember(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[1:], *output[1:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, said: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    keys = ctx.saved_tensors[0]
    return _scan_back(said.to(keys.dtype), *ctx.saved_tensors)


_scan.register_autograd(_gradients, setup_context=_remember)


def scan(*parts: Tensor) -> Tensor:
    return _scan(*parts)[0]
