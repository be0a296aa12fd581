"""Qwen3.8-Flash-Next: equal to transformers, and the same text whatever is drafted, batched, cut or cached."""

import json
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from fixtures import batch_of, by_backend, collect, generate, random_prompt, remembering, submit
from flash_next import write_flash_next, write_with_tower
from headstart.checkpoint import load_model
from headstart.engine import Engine, Handle, Request, insert_images
from headstart.engine.draft import head_drafts
from headstart.engine.prefix_disk import PrefixOptions
from headstart.images import read_image
from headstart.kernels.cpu.backend import StockCpu
from headstart.models import Model
from headstart.sampling import SamplingParams
from headstart.state import PrefixCache
from reference.pictures import CASES, END, IMAGE, START, picture

FILE = json.loads((Path(__file__).parents[1] / "reference" / "flash-next.json").read_text())
RECORDED = FILE["texts"]
ACCEPTED = ("accepted_draft_tokens", "proposed_draft_tokens")


@by_backend
def loaded(stock: bool = False) -> Model:
    with tempfile.TemporaryDirectory() as folder:
        backend = StockCpu("stock") if stock else None
        return load_model(write_flash_next(Path(folder)), dtype=mx.float32, backend=backend)


@pytest.mark.parametrize("stock", [False, True])
@pytest.mark.parametrize("text", RECORDED)
def test_logits_are_those_of_transformers_before_and_past_the_budget(text: dict, stock: bool) -> None:
    model, tokens = loaded(stock), mx.array([text["prompt"]])
    logits = np.array(model.logits(model.trunk(tokens, model.make_state(1), certain=tokens.shape[1]))[0])
    assert model.config["indexer_budget"] < len(text["prompt"]) / 3
    for at, expected in text["logits"].items():
        spread = max(expected) - min(expected)
        assert np.abs(logits[int(at)] - np.array(expected)).max() < 1e-4 * spread


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("text", RECORDED)
def test_greedy_text_is_that_of_transformers(text: dict, k: int) -> None:
    answer = generate(loaded(), text["prompt"], max_tokens=len(text["text"]), k=k)
    assert answer.tokens == text["text"]


def test_drafts_are_those_of_transformers_layers_wired_as_in_vllm() -> None:
    model = loaded()
    assert len(FILE["heads"]) == 50
    for each in FILE["heads"]:
        batch = batch_of(model, each["prompt"])
        assert head_drafts(model, batch, len(each["drafts"])).tokens[0].tolist() == each["drafts"]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(write_with_tower(tmp_path_factory.mktemp("pictures")), vision=True, dtype=mx.float32)


@pytest.mark.parametrize(("k", "case"), [(0, "one"), (3, "in the middle")])
def test_answers_about_pictures_are_those_of_transformers(seeing: Model, k: int, case: str) -> None:
    sizes, prompt = CASES[case]
    expected, tower = FILE["pictures"][case], seeing.tower
    shown = [read_image(Image.fromarray(picture(*size, n)), tower.rules) for n, size in enumerate(sizes)]
    tokens = [each for token in prompt for each in ([START, IMAGE, END] if token < 0 else [token])]
    tokens, images = insert_images(tokens, shown, tower)
    assert tokens == expected["tokens"]
    params = SamplingParams(max_tokens=len(expected["text"]), k=k)
    events = list(Engine(seeing).submit(Request(tokens, params, keep_logits=True, images=images)))
    assert [token for event in events for token in event.tokens] == expected["text"]
    first = next(event.logits for event in events if event.logits is not None)[0]
    spread = float((first.max() - first.min()).item())
    assert np.abs(np.array(first)[expected["top"]] - expected["logits"]).max() < 1e-4 * spread


@pytest.mark.parametrize("kind", [{}, {"temperature": 0.8, "seed": 3}])
def test_answers_about_pictures_do_not_depend_on_drafts_batch_cut_or_prefix(
    seeing: Model, kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, prompt = CASES["in the middle"]
    assert seeing.tower is not None
    shown = [read_image(Image.fromarray(picture(*size, n)), seeing.tower.rules) for n, size in enumerate(sizes)]
    tokens = [each for token in prompt for each in ([START, IMAGE, END] if token < 0 else [token])]
    tokens, images = insert_images(tokens, shown, seeing.tower)

    def ask(engine: Engine, k: int) -> Handle:
        return engine.submit(Request(tokens, SamplingParams(max_tokens=8, k=k, **kind), images=images))

    expected = collect(ask(Engine(seeing, prefix=PrefixCache(0)), 0)).tokens
    monkeypatch.setattr("headstart.kernels.backend.Backend.chunk", 16)
    prefix = PrefixCache(10**8)
    prefix.chunk = 16
    engine = Engine(seeing, prefix=prefix)
    beside = submit(engine, random_prompt(seeing, 21), max_tokens=12, k=2)
    answers = [collect(each) for each in (ask(engine, 3), ask(engine, 1), beside)]
    assert [each.tokens for each in answers[:2]] == [expected] * 2
    again = collect(ask(engine, 2))
    assert again.tokens == expected
    assert again.stats.prefix_cache_hit > 0


CHUNK = 64  # of the ordinary tests; slow ones have the engine's own
LENGTHS = (5, 11, 8, 8)  # of prompts; the last two are the same, of a chunk more
KINDS = ({}, {"temperature": 0.8, "seed": 3}, {}, {"temperature": 0.8, "seed": 4})


@lru_cache
def plain(chunk: int) -> list[tuple[list[int], list[int]]]:
    """Prompts, and what follows each at k = 0, alone and without a prefix cache."""
    model = loaded()
    prompts = [random_prompt(model, length + chunk * (n > 1), length) for n, length in enumerate(LENGTHS)]
    answers = [generate(model, p, max_tokens=24, k=0, **kind) for p, kind in zip(prompts, KINDS, strict=True)]
    return [(prompt, answer.tokens) for prompt, answer in zip(prompts, answers, strict=True)]


@pytest.mark.slow  # MLX compiles C++ for each
def test_passes_that_are_remembered_give_the_same_text() -> None:
    prompt, expected = plain(CHUNK)[3]
    found = generate(remembering(loaded()), prompt, max_tokens=24, k=3, **KINDS[3])
    assert found.tokens == expected


def test_output_is_the_same_when_prefixes_are_evicted_and_read_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache has room for one prompt of the two that take turns; then another process finds both on disk."""
    monkeypatch.setattr("headstart.kernels.backend.Backend.chunk", 16)
    model, prompts = loaded(), [random_prompt(loaded(), 40, seed) for seed in (1, 2)]
    expected = [generate(model, p, max_tokens=8, k=0, **kind).tokens for p, kind in zip(prompts, KINDS, strict=False)]
    options = PrefixOptions(folder=tmp_path / "prefixes", folder_bytes=10**8)
    for size in (150_000, 10**8):
        prefix = options.open(size, model)
        prefix.chunk = 16
        engine = Engine(model, prefix=prefix)
        for _ in range(2):
            for prompt, kind, tokens in zip(prompts, KINDS, expected, strict=False):
                answer = collect(submit(engine, prompt, max_tokens=8, k=2, **kind))
                assert answer.tokens == tokens
        stats = prefix.stats()
        assert (stats.evictions > 0) == (size < 10**8)
        prefix.close()
    assert stats.disk_tokens > 0


@pytest.mark.parametrize(
    ("k", "chunk"), [(3, CHUNK), *(pytest.param(k, 512, marks=pytest.mark.slow) for k in (1, 2, 4, 8, "auto"))]
)
def test_output_is_the_same_for_every_k_batch_and_prefix(
    k: int | str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and seeded; sequences join and leave, and a prompt of two chunks is found in the prefix cache."""
    monkeypatch.setattr("headstart.kernels.backend.Backend.chunk", chunk)
    model, expected, prefix = loaded(), plain(chunk), PrefixCache(10**8)
    prefix.chunk = chunk
    engine = Engine(model, max_sequences=3, prefix=prefix)
    handles = [
        submit(engine, prompt, max_tokens=24 - 3 * n, k=k, **kind)
        for n, ((prompt, _), kind) in enumerate(zip(expected, KINDS, strict=True))
    ]
    answers = [collect(handle) for handle in handles]
    for n, (answer, (_, tokens)) in enumerate(zip(answers, expected, strict=True)):
        assert answer.tokens == tokens[: 24 - 3 * n], n
        assert answer.stats.exact
    assert answers[3].stats.prefix_cache_hit == chunk
    accepted, drafted = (sum(getattr(a.stats, name) for a in answers) for name in ACCEPTED)
    assert 0 < accepted < drafted
