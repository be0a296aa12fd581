"""Answers about pictures: those of transformers, the same for every k, batch and prefix hit, and none the wait of
others. A text beside them is the same, bit for bit, as alone."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

import headstart.engine.images
from checkpoints import write_drafter
from headstart.checkpoint import load_model
from headstart.engine import Engine, Handle, Request, insert_images
from headstart.engine.batch import Batch
from headstart.engine.images import SequenceImages
from headstart.engine.prefix_disk import PrefixOptions, state_identity
from headstart.engine.slices import Slices
from headstart.engine.step import prefill
from headstart.errors import RequestError
from headstart.images import read_image
from headstart.models import Model
from headstart.models.qwen3_5_vision import QwenTower
from headstart.sampling import SamplingParams, SequenceParams
from headstart.state import PrefixCache
from reference.pictures import CASES, END, IMAGE, START, picture
from vision_models import write_with_tower

REFERENCE = json.loads((Path(__file__).parents[1] / "reference/vision.json").read_text())
C = 16  # tokens a chunk
SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
TEXT = [3, 99, 250, 7, 7, 12, 1000, 4, 55]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """Of float32 for the reference, of bfloat16 for the rest: our kernels take both."""
    found = {}
    for name, family, dtype in (
        ("dense", "dense", mx.float32), ("moe", "moe", mx.float32), ("half", "dense", mx.bfloat16)
    ):  # fmt: skip
        folder = write_with_tower(tmp_path_factory.mktemp(name), family, dtype=dtype)
        found[name] = load_model(folder, vision=True)
    return found


def request(model: Model, prompt: Sequence[int], sizes: Sequence[tuple[int, int]], **params: object) -> Request:
    """Return a request in which -1 in the prompt stands for the next picture."""
    assert model.tower is not None
    tokens = [each for token in prompt for each in ([START, IMAGE, END] if token < 0 else [token])]
    shown = [read_image(Image.fromarray(picture(*size, n)), model.tower.rules) for n, size in enumerate(sizes)]
    tokens, images = insert_images(tokens, shown, model.tower)
    params = {"max_tokens": 12, "k": 3} | params
    return Request(tokens, SamplingParams(**params), keep_logits=True, images=images)  # type: ignore[arg-type]


def of_case(model: Model, case: str, **params: object) -> Request:
    return request(model, CASES[case][1], CASES[case][0], **params)


def read(handle: Handle) -> tuple[list[int], mx.array]:
    tokens, logits = [], []
    for event in handle:
        assert event.error is None
        tokens += event.tokens
        logits += [event.logits] if event.logits is not None else []
    return tokens, mx.concatenate(logits)


def alone(model: Model, asked: Request) -> tuple[list[int], mx.array]:
    return read(Engine(model).submit(asked))


def same(one: tuple[list[int], mx.array], other: tuple[list[int], mx.array]) -> bool:
    return one[0] == other[0] and bool(mx.array_equal(one[1], other[1]))


@pytest.mark.parametrize("family", ["dense", "moe"])
@pytest.mark.parametrize("case", CASES)
def test_answers_of_transformers(models: dict[str, Model], family: str, case: str) -> None:
    model, expected = models[family], REFERENCE[family][case]
    asked = of_case(model, case, max_tokens=24)
    assert model.tower is not None
    images = SequenceImages(asked.images, len(asked.prompt), model.tower)
    assert images.positions(len(asked.prompt)).tolist() == expected["positions"]
    assert images.shift == expected["delta"]
    tokens, logits = alone(model, asked)
    assert tokens == expected["greedy"]
    np.testing.assert_allclose(np.array(logits[0])[expected["top"]], expected["logits"], atol=1e-3)


def test_stock_operations_give_the_same_answers(models: dict[str, Model]) -> None:
    model = replace(models["dense"], backend=models["dense"].backend.stock())
    text = Request(TEXT, SamplingParams(max_tokens=12, k=2), keep_logits=True)
    alone_text, engine = alone(model, text), Engine(model)
    handles = [engine.submit(text), engine.submit(of_case(model, "several", max_tokens=24))]
    first, second = (read(handle) for handle in handles)
    assert first[0] == alone_text[0]
    assert second[0] == REFERENCE["dense"]["several"]["greedy"]


@pytest.mark.parametrize(
    ("name", "params"),
    [
        pytest.param("half", SEEDED, id="half-seeded"),
        pytest.param("moe", {}, id="moe-greedy", marks=pytest.mark.slow),
        pytest.param("half", {}, id="half-greedy", marks=pytest.mark.slow),
        pytest.param("moe", SEEDED, id="moe-seeded", marks=pytest.mark.slow),
    ],
)
def test_same_for_every_k_in_a_batch_and_with_short_chunks(
    models: dict[str, Model], name: str, params: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models[name]
    expected = [alone(model, of_case(model, case, k=0, **params)) for case in ("several", "one")]
    text = Request(TEXT, SamplingParams(max_tokens=20, k=2), keep_logits=True)  # type: ignore[arg-type]
    alone_text = alone(model, text)
    for k in (1, 8):
        engine = Engine(model)
        order = [text, *(of_case(model, case, k=k, **params) for case in ("several", "one"))]
        handles = [engine.submit(each) for each in order]
        answers = [read(handle) for handle in handles]
        assert same(answers[0], alone_text)
        assert all(same(a, b) for a, b in zip(answers[1:], expected, strict=True))
    monkeypatch.setattr("headstart.kernels.backend.Backend.chunk", C)  # pictures are cut by chunks
    assert alone(model, of_case(model, "several", **params))[0] == expected[0][0]


@pytest.mark.parametrize("case", ["in the middle", "several"])
def test_logits_do_not_depend_on_the_slices(
    models: dict[str, Model], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice may end within a picture."""
    asked = of_case(models["half"], case)
    expected = alone(models["half"], asked)
    for width in (1, 7, 40):
        monkeypatch.setattr(Slices, "width", lambda self, begin, end, width=width: width)
        assert same(alone(models["half"], asked), expected)


@pytest.mark.slow
@pytest.mark.parametrize("params", [{}, SEEDED, {"temperature": 0.8}], ids=["greedy", "seeded", "unseeded"])
@pytest.mark.parametrize("name", ["half", "moe"])
def test_every_k_with_and_without_a_prefix_hit(
    models: dict[str, Model], name: str, params: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstart.kernels.backend.Backend.chunk", C)
    model, cache = models[name], PrefixCache(1 << 28, chunk=C)
    expected, exact = alone(model, of_case(model, "in the middle", k=0, **params)), params in ({}, SEEDED)
    for k in range(9):
        for prefix in (None, cache):
            answer = read(Engine(model, prefix=prefix).submit(of_case(model, "in the middle", k=k, **params)))
            assert len(answer[0]) == 12
            assert same(answer, expected) or not exact
    assert cache.stats().hits >= 8


def test_prefix_cache_knows_pictures(models: dict[str, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.kernels.backend.Backend.chunk", C)
    model, prompt = models["half"], [*range(30, 40), -1, *range(60, 90)]
    first, other = (request(model, prompt, [(64, 64)]) for _ in range(2))
    changed = np.array(other.images[0].pixels)
    changed[-1, -1] ^= 1
    other = replace(other, images=[replace(other.images[0], pixels=changed)])
    cache = PrefixCache(1 << 28, chunk=C)
    answers = {id(each): alone(model, each) for each in (first, other)}

    def ask(asked: Request) -> int:
        handle = Engine(model, prefix=cache).submit(asked)
        tokens, logits, hit = [], [], 0
        for event in handle:
            assert event.error is None
            tokens += event.tokens
            logits += [event.logits] if event.logits is not None else []
            hit = event.stats.prefix_cache_hit if event.stats else hit
        assert same((tokens, mx.concatenate(logits)), answers[id(asked)])
        return hit

    assert ask(first) == 0
    assert ask(other) == 0  # the first chunk holds tokens of the picture, and these are another's
    with monkeypatch.context() as patch:
        patch.setattr(QwenTower, "run", None)  # a picture that is remembered is not seen again
        assert ask(first) > 64
    assert ask(other) > 64


@pytest.mark.parametrize("eight_bits", [False, True], ids=["exact", "kv-8bit"])
def test_pictures_are_resumed_from_the_disk(
    models: dict[str, Model], eight_bits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a KV cache of eight bits no answer depends on k, the batch or a hit."""
    monkeypatch.setattr("headstart.kernels.backend.Backend.chunk", C)
    model = models["half"].with_kv_bits(8) if eight_bits else models["half"]
    prompt = [*range(30, 40), -1, *range(60, 90)]
    first, other = (request(model, prompt, [size]) for size in ((64, 64), (64, 65)))  # as many tokens
    assert first.prompt == other.prompt
    expected = {
        id(each): alone(model, replace(each, params=SamplingParams(max_tokens=12, k=0))) for each in (first, other)
    }

    def ask(*asked: Request) -> int:
        """Return the hits of a new process."""
        prefix = PrefixOptions(folder=tmp_path, folder_bytes=1 << 28).open(1 << 28, model)
        assert prefix is not None
        assert prefix.disk is not None
        prefix.chunk = C
        engine = Engine(model, prefix=prefix)
        for each, handle in [(each, engine.submit(each)) for each in asked]:
            assert same(read(handle), expected[id(each)])
        prefix.disk.close()
        return prefix.stats().hits

    assert ask(first) == 0
    assert ask(other) == 0  # it has the same tokens
    with monkeypatch.context() as patch:
        patch.setattr(QwenTower, "run", None)
        assert ask(first, other) == 2


def test_another_tower_finds_nothing_on_the_disk(models: dict[str, Model]) -> None:
    model = models["dense"]
    identity, tower = state_identity(model), model.tower
    assert tower is not None
    bias, rules = tower.merger.linear_fc2.bias, tower.rules
    before = mx.array(bias)
    try:
        bias[0] += 1
        assert state_identity(model) != identity
        bias[:] = before
        tower._rules = replace(rules, mean=(0.4, 0.5, 0.5))  # the cache knows pixels as they are before
        assert state_identity(model) != identity
    finally:
        bias[:], tower._rules = before, rules
    assert state_identity(model) == identity


def test_head_reads_pictures_too(models: dict[str, Model]) -> None:
    model = models["half"]
    asked = of_case(model, "one")
    assert model.tower is not None
    images, end = SequenceImages(asked.images, len(asked.prompt), model.tower), len(asked.prompt) - 1
    while not images.advance(model, 0, end):
        pass
    embeddings = images.embed(model, asked.prompt, 0, end)
    batches = [Batch.of_one(model, asked.prompt, SequenceParams(asked.params, 0, 0, 9), 3) for _ in range(2)]
    tokens, following = mx.array([asked.prompt[:-1]]), mx.array(asked.prompt[-1:])
    for batch in batches:
        images.place(batch, 0, end)
    prefill(model, batches[0], tokens, following, embeddings)
    hidden = model.trunk(tokens, batches[1].trunk_state, end, embeddings)
    first, state = batches[0].head_state, batches[1].head_state
    assert first is not None
    assert state is not None
    model.head(hidden[:, :-1], tokens[:, 1:], state, embeddings=embeddings[:, 1:])  # type: ignore[index]
    assert mx.array_equal(first.kv_layers[0].keys, state.kv_layers[0].keys)
    model.head(hidden[:, :-1], tokens[:, 1:], state)  # not the placeholders' own embeddings
    assert not mx.array_equal(first.kv_layers[0].keys, state.kv_layers[0].keys)


def test_tower_lets_running_answers_go_on(models: dict[str, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headstart.engine.images, "WORK_PER_TURN", 1)  # a block at a time
    model = models["half"]
    engine = Engine(model)
    running = engine.submit(Request(TEXT, SamplingParams(max_tokens=200, k=0)))
    while not engine.scheduler.running.sequences:
        engine.run_once()
    asked = engine.submit(of_case(model, "several"))
    turns, before = 0, engine.scheduler.running.sequences[0].num_generated
    while len(engine.scheduler.running.sequences) < 2:
        engine.run_once()
        turns += 1
    assert turns >= 3 * (1 + len(model.tower.blocks))  # type: ignore[union-attr]
    assert (
        engine.scheduler.running.sequences[0].num_generated >= before + turns - 2
    )  # a token a turn, read a turn late
    assert len(read(asked)[0]) == 12
    running.cancel()


def test_recomputed_sequences_see_their_pictures_again(models: dict[str, Model]) -> None:
    model = models["half"]
    expected = alone(model, of_case(model, "several"))
    engine = Engine(model)
    handle = engine.submit(of_case(model, "several"))
    while not engine.scheduler.running.sequences or engine.scheduler.running.sequences[0].num_generated < 3:
        engine.run_once()
    engine.recovery.recompute_all()
    assert read(handle)[0] == expected[0]


def test_refusals(models: dict[str, Model]) -> None:
    model = models["half"]
    good = of_case(model, "one")
    for prompt in (good.prompt[:10], [*good.prompt[:5], 7, *good.prompt[6:]], TEXT):
        with pytest.raises(RequestError, match="placeholders"):
            Engine(model).submit(Request(prompt, images=good.images))
    assert model.tower is not None
    with pytest.raises(RequestError, match="2 image placeholders, and there are 1"):
        insert_images([IMAGE, 4, IMAGE], [good.images[0].pixels], model.tower)


def test_a_model_without_tower_says_so(tmp_path: Path, models: dict[str, Model]) -> None:
    blind = load_model(write_with_tower(tmp_path))
    assert blind.tower is None
    with pytest.raises(RequestError, match="vision=True"):
        Engine(blind).submit(of_case(models["half"], "one"))


def test_a_block_drafter_changes_no_token(tmp_path: Path) -> None:
    folder = write_with_tower(tmp_path / "model", dtype=mx.bfloat16)
    drafter = write_drafter(tmp_path / "drafter", folder, dtype=mx.bfloat16)
    pair = load_model(folder, vision=True, drafter=drafter)
    expected = alone(load_model(folder, vision=True), of_case(pair, "one", k=0))
    for params in ({"k": 0}, {"k": 5}):
        assert same(alone(pair, of_case(pair, "one", **params)), expected)
