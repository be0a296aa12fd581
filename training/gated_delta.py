"""The gated delta rule, token by token and in chunks.

    S ← exp(g)·S;  S ← S + k ⊗ β(v − kᵀS);  o = qᵀS

In chunks everything but the state is a product over all chunks at once (Yang et al. 2024, arXiv 2412.06464); only
two small products per chunk are one after the other. Plain PyTorch, but for these on a GPU (`scan.py`).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
BLOCK = 8  # side of the diagonal blocks that are inverted by their series


def token_by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """What `chunked` must equal. q, k: [B, T, Hk, D]; v: [B, T, H, D]; g, beta: [B, T, H] → [B, T, H, D]."""
    q, k, v = _by_head(q, k, v)
    g, beta = g.transpose(1, 2).float(), beta.transpose(1, 2).float()
    state = torch.zeros(*q.shape[:2], q.shape[-1], v.shape[-1], device=q.device)  # [B, H, D, D]
    said = []
    for t in range(q.shape[2]):
        state = state * g[:, :, t, None, None].exp()
        missing = (v[:, :, t] - torch.einsum("bhd,bhde->bhe", k[:, :, t], state)) * beta[:, :, t, None]
        state = state + k[:, :, t, :, None] * missing[:, :, None]
        said.append(torch.einsum("bhd,bhde->bhe", q[:, :, t], state))
    return torch.stack(said, 2).transpose(1, 2)


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The same in chunks of 64 tokens. Large products are in v's type, what decides the state's size in float32."""
    dtype, length = v.dtype, v.shape[1]
    if pad := -length % CHUNK:  # tokens that change nothing, after all others
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, pad)) for x in (q, k, v))
        g, beta = (F.pad(x, (0, 0, 0, pad)) for x in (g, beta))
    q, k, v = (x.unflatten(2, (-1, CHUNK)) for x in _by_head(q, k, v))  # [B, H, N, C, D]
    g, beta = (x.transpose(1, 2).float().unflatten(2, (-1, CHUNK)) for x in (g, beta))  # [B, H, N, C]

    decay = g.cumsum(-1)
    earlier = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).tril()
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(~earlier, -torch.inf).exp()  # [B, H, N, C, C]
    near = k.to(dtype)
    overlap = ((near @ near.mT).float() * between * beta[..., None]).tril(-1)
    solved = InverseOfUnitLower.apply(overlap).to(dtype)  # (I + overlap)⁻¹
    values = solved @ (v * beta[..., None]).to(dtype)
    keys = solved @ (k * (beta * decay.exp())[..., None]).to(dtype)
    inside = ((q.to(dtype) @ near.mT).float() * between).to(dtype)
    asked = (q * decay.exp()[..., None]).to(dtype)
    left = (k * (decay[..., -1:] - decay).exp()[..., None]).to(dtype).mT  # [B, H, N, D, C]
    kept = decay[..., -1].exp()[..., None, None]  # [B, H, N, 1, 1]

    parts = values, keys, asked, inside, left, kept
    if v.is_cuda:
        from .scan import scan

        said = scan(*parts)
    else:
        said = _chunk_by_chunk(*parts)
    return said.flatten(2, 3)[:, :, :length].transpose(1, 2)


def _chunk_by_chunk(*parts: Tensor) -> Tensor:
    """What must wait for the state that the chunk before left. values, keys, asked [B, H, N, C, D], inside
    [B, H, N, C, C], left [B, H, N, D, C], kept [B, H, N, 1, 1] → [B, H, N, C, D]."""
    values, keys, *_ = parts
    state = torch.zeros(*keys.shape[:2], keys.shape[-1], values.shape[-1], device=values.device)
    said = []
    # Taken apart at once: a gradient through each index would be as large as the whole.
    for values, keys, asked, inside, left, kept in zip(*(part.unbind(2) for part in parts), strict=True):
        before = state.to(values.dtype)
        new = values - keys @ before
        said.append(asked @ before + inside @ new)
        state = state * kept + (left @ new).float()
    return torch.stack(said, 2)


class InverseOfUnitLower(torch.autograd.Function):
    """(I + A)⁻¹ for strictly lower triangular A [..., 64, 64], by products alone, which GPUs are good at.

    Diagonal blocks of 8 by their series, which ends after 8 terms (longer ones would lose digits: their powers
    grow like binomials where keys repeat); then blocks are joined in pairs, [[P, 0], [-QAP, Q]].
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        index = torch.arange(a.shape[-1], device=a.device)
        one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)

        def same(block: int) -> Tensor:
            return (index[:, None] // block) == (index[None, :] // block)

        n = -a * same(BLOCK)
        n2 = n @ n
        inverse = one + n
        inverse = inverse + inverse @ n2
        inverse = inverse + inverse @ (n2 @ n2)
        block = BLOCK
        while block < a.shape[-1]:
            joining = a * (same(2 * block) & ~same(block))
            inverse = inverse - inverse @ joining @ inverse
            block *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grad @ inverse.mT).tril(-1)


def _by_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, T, heads, D] → [B, H, T, D] in float32, queries and keys of length one and repeated for each value head."""
    repeats, scale = v.shape[2] // q.shape[2], q.shape[-1] ** -0.5

    def unit(x: Tensor) -> Tensor:
        x = x.float()
        return (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(repeats, 2)

    return unit(q).transpose(1, 2) * scale, unit(k).transpose(1, 2), v.float().transpose(1, 2)
