"""The chunked rule is the rule."""

import pytest

torch = pytest.importorskip("torch", reason="training needs PyTorch: pip install -e '.[training]'")

from training.gated_delta import InverseOfUnitLower, chunked, token_by_token  # noqa: E402


def inputs(length: int) -> list["torch.Tensor"]:
    """With decays from weak to strong, and a stretch in which the keys are nearly the same."""
    luck = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, length, 2, 32, generator=luck) for _ in range(2))
    k[:, 20:60] = k[:, 20:21] + 0.01 * k[:, 20:60]
    v = torch.randn(2, length, 4, 32, generator=luck)
    g = -torch.nn.functional.softplus(torch.randn(2, length, 4, generator=luck) - 3)
    beta = torch.sigmoid(2 * torch.randn(2, length, 4, generator=luck))
    return [x.requires_grad_() for x in (q, k, v, g * torch.tensor([0.1, 1.0, 4.0, 16.0]), beta)]


@pytest.mark.parametrize("length", [64, 130])
def test_chunks_give_what_token_by_token_gives_and_so_do_their_gradients(length: int) -> None:
    arguments = inputs(length)
    weights = torch.randn(2, length, 4, 32, generator=torch.Generator().manual_seed(1))
    wanted, found = token_by_token(*arguments), chunked(*arguments)
    pairs = [(wanted, found)]
    pairs += zip(
        torch.autograd.grad((wanted * weights).sum(), arguments),
        torch.autograd.grad((found * weights).sum(), arguments),
        strict=True,
    )
    for a, b in pairs:
        assert ((a - b).norm() / a.norm()).item() < 1e-5


def test_the_inverse_holds_where_all_keys_are_the_same() -> None:
    a = torch.ones(64, 64).tril(-1) * 0.99
    product = (torch.eye(64) + a) @ InverseOfUnitLower.apply(a)
    assert (product - torch.eye(64)).abs().max().item() < 1e-4
