"""A block drafter made by the recipe, at toy size: headstart drafts with it what PyTorch does."""

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="training needs PyTorch: pip install -e '.[training]'")

from headstart.checkpoint import load_model  # noqa: E402
from headstart.checkpoint.drafter import read_drafter  # noqa: E402
from training import export  # noqa: E402
from training.drafter import Drafter, DrafterShape, block_loss, load_drafter, read_text, save_drafter, survival  # noqa: E402
from training.model import Net  # noqa: E402
from training.own_text import generate  # noqa: E402
from training.shapes import Shape  # noqa: E402
from training.tokens import write  # noqa: E402
from training.train_drafter import DrafterRecipe, DrafterTraining  # noqa: E402

SHAPE = Shape(
    "toy",
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=2,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    intermediate_size=128,
    head_dim=32,
    linear_head_dim=32,
    full_attention_interval=2,
    context_length=256,
    vocab_size=512,
)
DRAFTER = DrafterShape(SHAPE, intermediate_size=96, block_size=6, window=12, target_layers=(0, 2, 3))


@pytest.fixture(scope="module")
def net() -> Net:
    """A random model in which all parts of all layers matter for the next token."""
    torch.manual_seed(1)
    made = Net(SHAPE).eval().requires_grad_(False)
    for weight in made.parameters():
        if weight.ndim >= 2:
            weight += 0.2 * torch.randn_like(weight)
        weight.copy_(weight.to(torch.bfloat16).float())
    return made


def test_generated_text_is_the_models_and_keeps_the_prompt(net: Net) -> None:
    rows, prompts = torch.randint(0, 500, (3, 70)), torch.tensor([5, 20, 40])
    texts = generate(net, rows, prompts, torch.tensor([0.0, 0.0, 1.0]))
    says = read_text(net, texts, (0,)).logits.argmax(-1)
    for row, prompt in enumerate(prompts.tolist()):
        assert torch.equal(texts[row, :prompt], rows[row, :prompt])
        same = (texts[row, prompt:] == says[row, prompt - 1 : -1]).float().mean()
        assert same == 1 if row < 2 else same < 1


@pytest.mark.parametrize("second", [False, True])
def test_headstart_drafts_what_pytorch_does(net: Net, tmp_path: Path, second: bool) -> None:
    drafter = Drafter(replace(DRAFTER, second=second, scored=4))
    with torch.no_grad():
        for weight in drafter.parameters():
            weight += torch.randn_like(weight) * (0.1 if weight.ndim == 2 else 0.3)
            weight.copy_(weight.to(torch.bfloat16).float())
    export.save(net, tmp_path / "model")
    save_drafter(drafter, tmp_path / "drafter")
    model = load_model(tmp_path / "model", drafter=tmp_path / "drafter", dtype=mx.float32)
    assert read_drafter(tmp_path / "drafter").report()["target"] == {
        "hidden_size": 64, "vocab_size": 512, "num_hidden_layers": 4,
    }  # fmt: skip
    tokens = torch.randint(0, 500, (1, 40))
    starts = torch.tensor([1, 5, 30])
    with torch.no_grad():
        made = drafter(net, tokens, read_text(net, tokens, DRAFTER.target_layers).taps, starts)
        theirs = net.logits(made)[0]  # [3, 5, V]
        if second:
            scores = theirs + drafter.candidate_selector(made, tokens[:, starts[:, None] + torch.arange(5)])[0]
    ids = tokens[0].tolist()
    for row, (start, expected) in enumerate(zip(starts.tolist(), theirs, strict=True)):
        state = model.make_state(1)
        model.trunk(mx.array([ids[:start]]), state, certain=start)
        state.commit(mx.array([start]), most=start)
        for k in (5, 2):  # a block that is cut short drafts the same
            ours, hidden = model.block_logits(mx.array([ids[start]]), k, state)
            assert np.abs(np.array(ours[0]) - expected[:k].numpy()).max() < 1e-3
            for j in range(k if second else 0):
                before = mx.array([ids[start + j]])
                scored = np.array(model.drafter.rescore(ours[:, j : j + 1], hidden[:, j : j + 1], before))[0, 0]
                kept = np.isfinite(scored)
                assert kept.sum() == 4
                assert np.abs(scored - scores[row, j].numpy())[kept].max() < 1e-3


@pytest.mark.slow
def test_training_helps_and_leaves_a_drafter_behind(net: Net, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for kind in ("chat", "code", "held-chat", "held-code"):
        write(kind, [rng.integers(0, 500, 200).tolist() for _ in range(20)], tmp_path)
    recipe = DrafterRecipe(
        seconds=8, length=48, prompt=(4, 16), texts=16, rows=8, held=4, warm_up=1, report_every=1e9, cool_down=1
    )
    drafters = [Drafter(replace(DRAFTER, second=second)) for second in (False, True)]
    training = DrafterTraining(net, drafters, recipe, tmp_path, tmp_path)
    texts, starts = training.held["code"], torch.arange(8, 40, 4)
    read = read_text(net, texts, DRAFTER.target_layers)

    @torch.no_grad()
    def losses() -> list[float]:
        return [block_loss(net, each, texts, read, starts, 5.0, 0.5).item() for each in training.drafters]

    before = losses()
    training.run()
    after = losses()
    assert all(mine < each for mine, each in zip(after, before, strict=True))
    training.drafters = [load_drafter(tmp_path / each.shape.name, each.shape) for each in drafters]
    assert losses() == pytest.approx(after, abs=0.05)  # in bfloat16
    log = json.loads((tmp_path / "training.json").read_text())["log"]
    assert (len(log[0]["head"]["chat"]), len(log[-1]["code"])) == (6, 5)
    assert [read_drafter(tmp_path / name).drafter.selects for name in ("dflash-2", "dflash2-2")] == [False, True]


def test_survival_counts_drafts_up_to_the_first_wrong_one(net: Net) -> None:
    tokens = torch.randint(0, 500, (2, 40))
    read, starts = read_text(net, tokens, DRAFTER.target_layers), torch.tensor([3, 9, 20])
    drafter = Drafter(DRAFTER)
    with torch.no_grad():
        drafts = net.logits(drafter(net, tokens, read.taps, starts)).argmax(-1)  # [2, 3, 5]
    tokens[0, 10:12] = drafts[0, 1, :2]  # the text after start 9 is now what is drafted there, twice
    tokens[0, 13:15] = drafts[0, 1, 3:]
    if drafts[0, 1, 2] == tokens[0, 12]:
        tokens[0, 12] += 1
    share = survival(net, drafter, tokens, read, starts[1:2], 5)
    assert share.tolist() == [0.5, 0.5, 0, 0, 0]
