"""Answers of Gemma 4 and Step-3.7 about pictures are the same for every k, batch, cut of the prompt and prefix hit,
with drafts of an assistant and of a head."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from gemma4 import write_assistant
from headstart.checkpoint import load_model
from headstart.engine import Engine, Handle, Request, insert_images
from headstart.engine.batch import Batch
from headstart.engine.images import SequenceImages
from headstart.engine.slices import Slices
from headstart.engine.step import prefill
from headstart.errors import RequestError
from headstart.images import read_image
from headstart.models import Model
from headstart.sampling import SamplingParams, SequenceParams
from headstart.state import PrefixCache
from reference.pictures import IMAGE, TOWER_CASES, picture
from towers import SHAPES, write_seeing

C = 16  # tokens a chunk: fewer than an image has
SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
TEXT = [3, 99, 250, 7, 7, 12, 1000, 4, 55]
FAST = ("gemma4_a4b", "step3p7")
EVERY = [shape if shape in FAST else pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES]
QUICK = {("gemma4_e2b", "greedy"), ("gemma4_a4b", "seeded"), ("step3p7", "greedy")}
CASES = [
    pytest.param(shape, params, id=f"{shape}-{name}", marks=[] if (shape, name) in QUICK else pytest.mark.slow)
    for shape in SHAPES
    for name, params in (("greedy", {}), ("seeded", SEEDED))
]


@lru_cache
def loaded(shape: str) -> Model:
    """With an assistant, or with the head that the release has."""
    with tempfile.TemporaryDirectory() as folder:
        release = write_seeing(Path(folder, "model"), shape)
        drafter = None
        if shape != "step3p7":
            drafter = write_assistant(Path(folder, "assistant"), release, num_centroids=10)
        return load_model(release, dtype=mx.float32, vision=True, drafter=drafter)


def request(model: Model, prompt: Sequence[int], sizes: Sequence[tuple[int, int]], **params: object) -> Request:
    """Return a request in which -1 in the prompt stands for the next picture."""
    assert model.tower is not None
    shown = [read_image(Image.fromarray(picture(*size, n)), model.tower.rules) for n, size in enumerate(sizes)]
    tokens, images = insert_images([IMAGE if token < 0 else token for token in prompt], shown, model.tower)
    params = {"max_tokens": 10, "k": 3} | params
    return Request(tokens, SamplingParams(**params), keep_logits=True, images=images)  # type: ignore[arg-type]


def of_case(model: Model, case: str, **params: object) -> Request:
    return request(model, TOWER_CASES[case][1], TOWER_CASES[case][0], **params)


Answer = tuple[list[int], mx.array, int]


def read(handle: Handle) -> Answer:
    """Return the tokens, their logits, and how many of the prompt's tokens were cached."""
    tokens, logits, hit = [], [], 0
    for event in handle:
        assert event.error is None
        tokens += event.tokens
        logits += [event.logits] if event.logits is not None else []
        hit = event.stats.prefix_cache_hit if event.stats else hit
    return tokens, mx.concatenate(logits), hit


def alone(model: Model, asked: Request) -> Answer:
    return read(Engine(model).submit(asked))


def same(one: Answer, other: Answer) -> bool:
    return one[0] == other[0] and bool(mx.array_equal(one[1], other[1]))


@pytest.mark.parametrize(("shape", "params"), CASES)
def test_same_for_every_k_and_in_a_batch(shape: str, params: dict[str, object]) -> None:
    model = loaded(shape)
    expected = [alone(model, of_case(model, case, k=0, **params)) for case in ("two", "one")]
    text = Request(TEXT, SamplingParams(max_tokens=14, k=2), keep_logits=True)
    alone_text, engine = alone(model, text), Engine(model)
    order = [text, *(of_case(model, case, k=k, **params) for case, k in (("two", 3), ("one", 1)))]
    answers = [read(handle) for handle in [engine.submit(each) for each in order]]
    assert same(answers[0], alone_text)
    assert all(same(a, b) for a, b in zip(answers[1:], expected, strict=True))


@pytest.mark.parametrize("shape", EVERY)
def test_same_however_a_prompt_is_cut(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(shape)
    asked = of_case(model, "two", max_tokens=6)
    expected = alone(model, asked)
    for width in (7, 90):
        monkeypatch.setattr(Slices, "width", lambda self, begin, end, width=width: width)
        assert same(alone(model, asked), expected)
    monkeypatch.setattr("headstart.kernels.backend.Backend.chunk", C)
    assert same(alone(model, asked), expected)


def test_images_seen_whole_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded("gemma4_a4b")
    asked = of_case(model, "two", max_tokens=3)
    assert model.tower is not None
    images = SequenceImages(asked.images, len(asked.prompt), model.tower)
    (first, _), (second, end) = images._blocks
    rows, columns = model.tower.rules.grid(asked.images[0].pixels)
    last = first + rows * columns
    assert [images.whole(*each) for each in ((0, first), (0, first + 5), (first, first + 5))] == [first, first, last]
    assert [images.whole(*each) for each in ((0, end), (first, end), (last, end + 2))] == [first, last, second]
    assert images.whole(end, end + 2) == end + 2
    assert images.whole_chunks([first - 3, first + 1, first + 2, second + 4, end + 2]) == [
        first - 3, first, second, end + 2
    ]  # fmt: skip
    expected = alone(model, asked)
    monkeypatch.setattr(SequenceImages, "whole", lambda self, begin, end: end)
    monkeypatch.setattr(Slices, "width", lambda self, begin, end: 7)
    assert not same(alone(model, asked), expected)  # what a cut would change


@pytest.mark.parametrize("shape", EVERY)
def test_prefix_cache_knows_pictures(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.kernels.backend.Backend.chunk", C)
    model, prompt = loaded(shape), [*range(30, 40), -1, *range(60, 90)]
    first, other = (request(model, prompt, [(64, 60)], max_tokens=5) for _ in range(2))
    changed = np.array(other.images[0].pixels)
    changed[-1, -1] ^= 1
    other = replace(other, images=[replace(other.images[0], pixels=changed)])
    cache = PrefixCache(1 << 28, chunk=C)
    expected = [alone(model, each) for each in (first, other)]
    hits = []
    for asked, answer in [(first, expected[0]), (other, expected[1]), (first, expected[0])]:
        found = read(Engine(model, prefix=cache).submit(asked))
        assert same(found, answer)
        hits.append(found[2])
    assert max(hits[:2]) <= 16
    with monkeypatch.context() as patch:
        patch.setattr(type(model.tower), "run", None)  # a picture that is remembered is not seen again
        found = read(Engine(model, prefix=cache).submit(first))
    assert same(found, expected[0])
    assert found[2] > 64 + 8


@pytest.mark.parametrize("shape", EVERY)
def test_drafts_go_on(shape: str) -> None:
    model = loaded(shape)
    engine = Engine(model)
    events = list(engine.submit(of_case(model, "two", max_tokens=24)))
    stats = events[-1].stats
    assert stats is not None
    assert sum(stats.proposed_by_position) + stats.proposed_blocks > 0


def test_recomputed_sequences_see_their_pictures_again() -> None:
    model = loaded("gemma4_a4b")
    expected = alone(model, of_case(model, "two"))
    engine = Engine(model)
    handle = engine.submit(of_case(model, "two"))
    while not engine.scheduler.running.sequences or engine.scheduler.running.sequences[0].num_generated < 3:
        engine.run_once()
    engine.recovery.recompute_all()
    assert read(handle)[0] == expected[0]


def test_prompts_that_do_not_place_images_are_refused() -> None:
    model = loaded("step3p7")
    good = of_case(model, "two")
    for prompt in (good.prompt[:60], [*good.prompt[:40], 7, *good.prompt[41:]], TEXT):
        with pytest.raises(RequestError, match="placeholders"):
            Engine(model).submit(Request(prompt, images=good.images))
    assert model.tower is not None
    with pytest.raises(RequestError, match="2 image placeholders, and there are 1"):
        insert_images([IMAGE, 4, IMAGE], [good.images[0].pixels], model.tower)


@pytest.mark.parametrize("cut", [40, 45, 60])
def test_every_module_of_a_head_reads_pictures(cut: int) -> None:
    """Whatever the prompt is cut at: before a picture, in its first tokens, or within."""
    model = loaded("step3p7")
    asked = of_case(model, "two")
    prompt, end = asked.prompt, len(asked.prompt) - 1
    assert model.tower is not None
    images = SequenceImages(asked.images, len(prompt), model.tower)
    while not images.advance(model, 0, end):
        pass
    states = []
    for ends in ([end], [cut, end]):
        batch = Batch.of_one(model, prompt, SequenceParams(asked.params, 0, 0, 9), 3)
        for begin, stop in pairwise([0, *ends]):
            embeddings = images.embed(model, prompt, begin, stop, back=model.head_modules - 1)
            tokens, following = mx.array([prompt[begin:stop]]), mx.array([prompt[stop]])
            prefill(model, batch, tokens, following, embeddings)
        states.append(batch.head_state)
    whole, parts = states
    assert whole is not None
    assert parts is not None
    final = end - model.head_modules  # pairs of all modules whose tokens are known
    for one, other in zip(whole.kv_layers, parts.kv_layers, strict=True):
        assert mx.array_equal(one.keys[:, :, :final], other.keys[:, :, :final])
    embeddings = images.embed(model, prompt, 0, end)
    assert embeddings is not None
    trunk, state = model.make_state(1), model.make_head_state(1)
    fed, tokens = model.trunk(mx.array([prompt[:-1]]), trunk, end, embeddings), mx.array([prompt[1:]])
    for module in range(model.head_modules):
        width = end - 1 - module
        given = embeddings[:, module + 1 :][:, :width]
        fed = model.head(fed[:, :width], tokens[:, module : module + width], state, module, embeddings=given)
        held = whole.kv_layers[module].keys[:, :, :final], state.kv_layers[module].keys[:, :, :final]
        assert mx.array_equal(*held)
