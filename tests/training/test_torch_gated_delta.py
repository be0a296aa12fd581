"""The chunked rule is the rule."""

import os

import pytest

torch = pytest.importorskip("torch", reason="training needs PyTorch: pip install -e '.[training]'")

from training.gated_delta import InverseOfUnitLower, _chunk_by_chunk, chunked, token_by_token  # noqa: E402


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


def test_the_kernel_gives_what_its_twin_gives_and_so_do_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU Triton's interpreter runs it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "1")
    pytest.importorskip("triton")
    from training.scan import scan

    luck = torch.Generator().manual_seed(0)
    shapes = [(32, 64)] * 3 + [(32, 32), (64, 32)]  # values, keys, asked, inside, left
    parts = [0.1 * torch.randn(2, 3, 4, *shape, generator=luck) for shape in shapes]
    parts.append(torch.rand(2, 3, 4, 1, 1, generator=luck))
    parts = [part.to(device).requires_grad_() for part in parts]
    weights = torch.randn(2, 3, 4, 32, 64, generator=luck).to(device)
    wanted, found = _chunk_by_chunk(*parts), scan(*parts)
    pairs = [(wanted, found)]
    pairs += zip(*(torch.autograd.grad((said * weights).sum(), parts) for said in (wanted, found)), strict=True)
    for a, b in pairs:
        assert ((a - b).norm() / a.norm()).item() < (1e-5 if device == "cpu" else 5e-3)
