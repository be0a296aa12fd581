"""Muon for the matrices, AdamW for everything else: the embedding, norms, convolutions, decays and small gates."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Newton-Schulz steps towards the nearest orthogonal matrix, each with the coefficients that suit it.
STEPS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
SMALLEST = 16  # a matrix with a side below this is a gate: AdamW's


@dataclass(frozen=True)
class Rates:
    muon: float = 0.02
    adam: float = 3e-3
    weight_decay: float = 0.1  # of the matrices


@dataclass(frozen=True)
class Matrices:
    """A weight that is one matrix, or several: experts are one each, and gate and up of an expert two."""

    weight: nn.Parameter
    count: int

    @classmethod
    def of(cls, name: str, weight: nn.Parameter) -> "Matrices | None":
        """None where it is AdamW's."""
        if weight.ndim == 3 and "experts" in name:
            return cls(weight, len(weight) * (2 if "gate_up" in name else 1))
        is_small = weight.ndim != 2 or min(weight.shape) < SMALLEST
        if is_small or "embed_tokens" in name or "codebook" in name or name.endswith("mlp.gate.weight"):
            return None
        return cls(weight, 1)

    def apart(self, x: Tensor) -> Tensor:
        """[count, rows, columns] of the weight, or of its gradient."""
        return x.reshape(self.count, -1, x.shape[-1])


class Optimiser:
    def __init__(self, net: nn.Module, rates: Rates):
        self.rates = rates
        named = [(weight, Matrices.of(name, weight)) for name, weight in net.named_parameters()]
        self.rest = [weight for weight, matrices in named if matrices is None]
        self.adam = torch.optim.AdamW(self.rest, lr=rates.adam, betas=(0.9, 0.95), eps=1e-9, weight_decay=0.0)
        self.by_shape: dict[tuple[int, ...], list[Matrices]] = {}  # so that alike ones are updated together
        for _, each in named:
            if each is not None:
                self.by_shape.setdefault(tuple(each.apart(each.weight).shape[1:]), []).append(each)
        self.momentum = {
            shape: torch.zeros(sum(each.count for each in group), *shape, device=group[0].weight.device)
            for shape, group in self.by_shape.items()
        }

    def step(self, scale: float, momentum: float) -> None:
        """`scale` of the learning rates; forgets the gradients."""
        nn.utils.clip_grad_norm_(self.rest, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = self.rates.adam * scale
        self.adam.step()
        self.adam.zero_grad()
        for shape, group in self.by_shape.items():
            self._muon(shape, group, self.rates.muon * scale, momentum)

    @torch.no_grad()
    def _muon(self, shape: tuple[int, ...], group: list[Matrices], rate: float, momentum: float) -> None:
        gradient = torch.cat([each.apart(_gradient(each.weight)) for each in group])  # [n, rows, columns]
        average = self.momentum[shape].lerp_(gradient, 1 - momentum)
        update = orthogonal(gradient.lerp(average, momentum)) * max(1, shape[0] / shape[1]) ** 0.5
        for each, change in zip(group, update.split([each.count for each in group]), strict=True):
            each.weight.mul_(1 - rate * self.rates.weight_decay)
            each.weight.add_(change.reshape(each.weight.shape), alpha=-rate)
            each.weight.grad = None

    def state(self) -> dict[str, Any]:
        return {"adam": self.adam.state_dict(), "momentum": self.momentum}

    def restore(self, state: dict[str, Any]) -> None:
        self.adam.load_state_dict(state["adam"])
        self.momentum = state["momentum"]


def orthogonal(x: Tensor) -> Tensor:
    """Roughly the nearest matrix with singular values of one, for each of [n, rows, columns]."""
    tall = x.shape[-2] > x.shape[-1]
    y = (x.mT if tall else x).to(torch.bfloat16 if x.is_cuda else x.dtype)
    y = y / (y.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-7)
    for a, b, c in STEPS:
        square = y @ y.mT
        y = a * y + (b * square + c * (square @ square)) @ y
    return (y.mT if tall else y).to(x.dtype)


def _gradient(weight: nn.Parameter) -> Tensor:
    assert weight.grad is not None, "a matrix took no part in the loss"
    return weight.grad
