"""What is minimised: the trunk's next token, the head's chain of drafts, an even load of experts, and no loops."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .model import Net, Routing
from .vocabulary import added

IGNORED = -100  # cross_entropy's own


@dataclass(frozen=True)
class Weights:
    head: float = 0.3
    balance: float = 0.005
    loops: float = 0.4
    teacher: float = 0.5  # the share of the head's loss that is against the trunk's distribution, not the data


def joint_loss(net: Net, tokens: Tensor, starts: Tensor, steps: int, weights: Weights) -> tuple[Tensor, Tensor]:
    """tokens [B, T + steps + 1], `starts` [n] of the chains, below T - steps → the loss, and its parts for the log:
    next token, then the cross-entropy of drafts 1 .. steps.

    The trunk's gradient passes through the head: the trunk learns to be easy to continue.
    """
    length = tokens.shape[1] - steps - 1
    targets = _without_empty_thoughts(tokens, net.shape.vocab_size)
    routing: Routing = []
    embedded = net.embed(tokens[:, : length + steps]).to(_compute_type(tokens.device))
    hidden = net.model(embedded[:, :length], routing)
    logits = net.logits(hidden).float()
    next_token = F.cross_entropy(logits.flatten(0, 1), targets[:, 1 : length + 1].flatten(), ignore_index=IGNORED)
    teacher = logits.detach().softmax(-1)  # [B, T, V]

    data, imitation = [], []
    for j, made in enumerate(net.mtp.unroll(embedded, hidden, starts, steps, routing), 1):
        at = torch.arange(length - 1, device=tokens.device) if j == 1 else starts
        drafts = net.logits(made[:, : length - 1] if j == 1 else made).float().log_softmax(-1)  # [B, n, V]
        data.append(F.nll_loss(drafts.flatten(0, 1), targets[:, at + j + 1].flatten(), ignore_index=IGNORED))
        imitation.append(-(teacher[:, at + j] * drafts).sum(-1).mean())
    share = weights.teacher
    head = torch.stack([(1 - share) * a + share * b for a, b in zip(data, imitation, strict=True)]).mean()
    loss = next_token + weights.head * head + weights.balance * _imbalance(routing)
    return loss, torch.stack([next_token, *data]).detach()


def loop_loss(net: Net, tokens: Tensor, periods: Tensor) -> Tensor:
    """tokens [B, T + 1], each row a span of `periods` [B] tokens over and over: every repetition should be half as
    likely as the one before (DITTO: Xu et al. 2022, arXiv 2206.02369). Otherwise each makes the next more likely,
    until greedy text goes round for ever."""
    length = tokens.shape[1] - 1
    hidden = net.model(net.embed(tokens[:, :length]).to(_compute_type(tokens.device)), [])
    log_likely = -F.cross_entropy(net.logits(hidden).float().mT, tokens[:, 1:], reduction="none")  # [B, T]
    likely = log_likely.exp()
    earlier = torch.arange(length, device=tokens.device) - periods[:, None]
    wanted = 0.5 * likely.detach().gather(1, earlier.clamp(min=0))
    loss = -torch.log1p(-(likely - wanted).abs().clamp(max=1 - 1e-5))
    return (loss * (earlier >= 0)).sum() / (earlier >= 0).sum()


def _without_empty_thoughts(tokens: Tensor, vocabulary: int) -> Tensor:
    """Targets in which an empty block of thinking is not to be learned: the chat template writes it where no
    thinking is wanted. Where the model is to think, it must not have learned to open the block and close it."""
    ids, targets = added(vocabulary), tokens.clone()
    empty = (tokens[:, :-2] == ids.think) & (tokens[:, 2:] == ids.end_of_think)
    targets[:, 1:-1] = targets[:, 1:-1].masked_fill(empty, IGNORED)
    return targets


def _imbalance(routing: Routing) -> Tensor | float:
    """One where every expert is chosen as often as any other, more where not; 0 where there are no experts."""
    if not routing:
        return 0.0
    probabilities, load = (torch.stack(column) for column in zip(*routing, strict=True))  # [passes, E]
    return (probabilities * load.detach()).sum(-1).mean() * load.shape[-1]


def _compute_type(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32
