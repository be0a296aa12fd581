"""The whole recipe at toy size: from wheels to a checkpoint that headstart loads and whose head is of use."""

import zipfile
from collections import Counter
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="training needs PyTorch: pip install -e '.[training]'")

import pip  # noqa: E402  # a package of plain Python that every environment has

import headstart  # noqa: E402
from headstart import checkpoint  # noqa: E402
from headstart.models import Model  # noqa: E402
from training import corpus, export, tokenizer  # noqa: E402
from training.evaluate import decode, read  # noqa: E402
from training.rows import Rows  # noqa: E402
from training.shapes import Shape  # noqa: E402
from training.sources import sources  # noqa: E402
from training.tokens import Documents  # noqa: E402
from training.tokens import read as read_tokens  # noqa: E402
from training.train import Recipe, Stage, Training  # noqa: E402

VOCABULARY = 512
TOY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "head_dim": 32,
    "linear_head_dim": 32,
    "full_attention_interval": 2,
    "context_length": 256,
    "vocab_size": VOCABULARY,
}
SHAPES = {
    "dense": Shape("toy", intermediate_size=128, **TOY),
    "moe": Shape("toy-moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, **TOY),
}
RECIPE = Recipe(
    steps=240,
    seconds=600.0,
    stages=(Stage(0.8, 64, 12), Stage(1.0, 128, 6)),
    unrolled=3,
    loop_rows=1,
    loop_context=64,
    loop_periods=(4, 16),
    warm_up=10,
    log_every=60,
    held_rows=4,
)


def wheels(folder: Path) -> Path:
    """Two wheels of installed packages, and the list that names them: `made` to learn from, `kept` to test with."""
    root = Path(pip.__file__).parent / "_internal"
    files = sorted(root.rglob("*.py"))
    for name, chosen in (("made", files[::2]), ("kept", files[1::8])):
        with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
            for path in chosen:
                archive.write(path, f"{name}/{path.relative_to(root)}")
    listed = folder / "packages.toml"
    entry = '= { version = "1.0", licence = "MIT" }\n'
    listed.write_text(f"[held_out]\nkept {entry}[train]\nmade {entry}")
    return listed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With wheels, a tokenizer made of them, and the corpus in its tokens."""
    made = tmp_path_factory.mktemp("recipe")
    listed = wheels(made)
    texts = sources(made / "made-1.0-py3-none-any.whl")
    tokenizer.save(tokenizer.train(texts, VOCABULARY), made / "tokenizer", context_length=256)
    tokens = corpus.build(made, made / "corpus", made / "tokenizer", listed, processes=1)
    assert min(tokens.values()) > 2000, tokens
    return made


@pytest.mark.slow
@pytest.mark.parametrize("family", SHAPES)
def test_from_wheels_to_a_checkpoint_whose_head_drafts_better_than_chance(family: str, folder: Path) -> None:
    out, shape = folder / family, SHAPES[family]
    stopped = Training(shape, RECIPE, folder / "corpus", out, "cpu", compiled=False)
    assert not stopped.run(stop_after=0.0)  # it is stopped at once, and the next goes on from there
    training = Training(shape, RECIPE, folder / "corpus", out, "cpu", compiled=False)
    assert training.run(stop_after=float("inf"))
    training.finish()
    export.add_tokenizer(out, folder / "tokenizer")
    losses = [entry["losses"] for entry in training.log if "losses" in entry]
    assert losses[-1][0] < losses[0][0] - 1.0
    assert losses[-1][1] < losses[0][1] - 0.5

    model, words = headstart.load(str(out))
    held = read_tokens("held-code", folder / "corpus")
    texts = [held.tokens[a : a + 200].tolist() for a, n in zip(held.starts, held.lengths, strict=True) if n >= 200]
    found = read(model, texts[:12], k=3)
    chance = best_guess(model, texts[:12])
    for j in (1, 2, 3):
        assert found.agreement[j] > chance + 0.1, (found, chance)
    straight, looping = decode(model, words, [text[:64] for text in texts[:4]], k=3)
    assert straight.texts + looping.texts == 4

    # Another training can begin with it, and does not begin anew.
    further = Training(
        shape, RECIPE, folder / "corpus", folder / f"{family}-further", "cpu", compiled=False, begin=out
    )
    further.run(stop_after=0.0)
    further._one_step()
    assert further.log[0]["losses"][0] < losses[0][0] - 1.0

    # And PyTorch says the same of the exported files.
    exact, net, ids = checkpoint.load_model(out, dtype=mx.float32), export.load(out, shape), texts[0]
    ours = exact.logits(exact.trunk(mx.array([ids]), exact.make_state(1), certain=len(ids)))
    with torch.no_grad():
        theirs = net.logits(net.model(net.embed(torch.tensor([ids])), []))
    assert np.abs(np.array(ours) - theirs.numpy()).max() < 1e-3


def best_guess(model: Model, texts: list[list[int]]) -> float:
    """How often the one token that the trunk says most often is what it says: what a head that knows nothing of the
    text can reach."""
    says: Counter[int] = Counter()
    for text in texts:
        hidden = model.trunk(mx.array([text]), model.make_state(1), certain=len(text))
        says.update(mx.argmax(model.logits(hidden)[0], axis=-1).tolist())
    return says.most_common(1)[0][1] / says.total()


def documents(*lengths: int) -> Documents:
    """Tokens that tell where they are from: document · 100 + place."""
    tokens = [100 * i + place for i, length in enumerate(lengths) for place in range(length)]
    return Documents(np.array(tokens, np.uint16), np.array(lengths, np.int64))


def test_rows_of_whole_documents_begin_where_one_does() -> None:
    rows = Rows(documents(30, 40, 20, 35, 25), length=50, whole=True, seed=0)
    for _ in range(4):
        assert all(int(row[0]) % 100 == 0 for row in rows.take(2))


def test_every_pass_has_an_order_of_its_own_and_resuming_finds_it() -> None:
    rows = Rows(documents(*[40] * 30), length=50, whole=False, seed=0)
    first = rows.take(10)
    while not rows.passes:
        rows.take(10)
    assert not torch.equal(rows.take(10), first)
    again = Rows(documents(*[40] * 30), length=50, whole=False, seed=0)
    again.resume(rows.passes, rows.taken)
    assert torch.equal(again.take(5), rows.take(5))


def test_the_learning_rate_rises_stays_and_falls_to_zero() -> None:
    recipe = Recipe()
    assert recipe.scale(0, 0.0) < 0.01
    assert recipe.scale(2000, 0.3) == 1.0
    assert recipe.scale(5000, 0.7) == pytest.approx(0.5)
    assert recipe.scale(6000, 1.0) == 0.0
