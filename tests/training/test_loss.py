"""What is minimised, on models of random weights."""

import pytest

torch = pytest.importorskip("torch", reason="training needs PyTorch: pip install -e '.[training]'")

from training.loss import IGNORED, Weights, _without_empty_thoughts, joint_loss, loop_loss  # noqa: E402
from training.model import Net  # noqa: E402
from training.optimiser import Matrices, orthogonal  # noqa: E402
from training.reference import drafts  # noqa: E402
from training.shapes import Shape  # noqa: E402
from training.vocabulary import added  # noqa: E402

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "head_dim": 32,
    "linear_head_dim": 16,
    "full_attention_interval": 2,
    "vocab_size": 97,
}
DENSE = Shape("toy", intermediate_size=48, **SIZES)
MOE = Shape("toy-moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, **SIZES)
BOTH = pytest.mark.parametrize("shape", [DENSE, MOE], ids=["dense", "moe"])


def net(shape: Shape) -> Net:
    """Of random weights that are large enough for attention to matter."""
    torch.manual_seed(0)
    made = Net(shape)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.ndim >= 2 and "conv" not in name:
                weight.mul_(6)
    return made


def tokens(rows: int, length: int) -> "torch.Tensor":
    return torch.randint(0, 90, (rows, length), generator=torch.Generator().manual_seed(2))


@BOTH
def test_chains_side_by_side_are_the_chains_one_by_one(shape: Shape) -> None:
    model, ids = net(shape), tokens(1, 40)
    with torch.no_grad():
        hidden = model.model(model.embed(ids[:, :30]), [])
        starts = torch.tensor([3, 11, 22])
        together = model.mtp.unroll(model.embed(ids), hidden, starts, 4, [])
        for i, at in enumerate(starts.tolist()):
            # A chain alone knows nothing of later positions, nor of other chains.
            embedded = model.embed(ids[:, : at + 5])
            alone = model.mtp.unroll(embedded, hidden[:, : at + 1], starts[i : i + 1], 4, [])
            torch.testing.assert_close(together[0][:, at], alone[0][:, at])
            for many, one in zip(together[1:], alone[1:], strict=True):
                torch.testing.assert_close(many[:, i], one[:, 0])


def test_a_draft_is_fed_to_the_next() -> None:
    model, ids = net(DENSE), tokens(1, 20)
    with torch.no_grad():
        hidden = model.model(model.embed(ids), [])
        said, _ = drafts(model, ids[0].tolist(), hidden, 12, 3)
        fed = torch.cat([ids[:, :14], torch.tensor([said])], 1)
        made = model.mtp.unroll(model.embed(fed), hidden[:, :13], torch.tensor([12]), 3, [])
        assert [int(model.logits(x)[0, -1].argmax()) for x in made] == said


@BOTH
def test_the_loss_teaches_every_weight(shape: Shape) -> None:
    model = net(shape)
    loss, parts = joint_loss(model, tokens(2, 32 + 4), torch.arange(0, 26, 4), 3, Weights())
    loss.backward()
    assert parts.shape == (4,)
    silent = [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert silent == []


def test_an_empty_block_of_thinking_is_no_target_and_a_thought_is() -> None:
    ids = added(97)
    row = torch.tensor([[5, ids.think, 7, ids.end_of_think, 8, ids.think, 7, 9, ids.end_of_think, 3]])
    targets = _without_empty_thoughts(row, 97)[0]
    assert targets[2] == IGNORED
    assert (targets == IGNORED).sum() == 1


def test_loops_cost_more_the_surer_the_model_is_of_them() -> None:
    model = net(DENSE)
    span = tokens(1, 6)[0]
    row, periods = span.repeat(12)[None, :65], torch.tensor([6])
    before = loop_loss(model, row, periods)
    adam = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):  # learn the loop by heart
        adam.zero_grad()
        hidden = model.model(model.embed(row[:, :-1]), [])
        torch.nn.functional.cross_entropy(model.logits(hidden)[0], row[0, 1:]).backward()
        adam.step()
    assert loop_loss(model, row, periods) > 2 * before


def test_muon_steps_are_orthogonal_and_experts_are_matrices_of_their_own() -> None:
    x = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(3))
    values = torch.linalg.svdvals(orthogonal(x))
    assert values.min() > 0.6
    assert values.max() < 1.3
    counts = {name: each.count for name, w in net(MOE).named_parameters() if (each := Matrices.of(name, w))}
    assert counts["model.layers.0.mlp.experts.gate_up_proj"] == 8
    assert counts["model.layers.0.mlp.experts.down_proj"] == 4
    assert not any("embed" in name or "norm" in name or name.endswith("mlp.gate.weight") for name in counts)
