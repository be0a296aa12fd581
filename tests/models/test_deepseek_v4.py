"""DeepSeek-V4: equal to transformers, and the same text whatever is drafted, batched, cut or cached."""

import json
import tempfile
from functools import lru_cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from deepseek_v4 import write_deepseek_v4
from fixtures import batch_of, by_backend, collect, generate, random_prompt, remembering, submit
from headstart.checkpoint import load_model
from headstart.engine import Engine
from headstart.engine.draft import head_drafts
from headstart.engine.prefix_disk import PrefixOptions
from headstart.kernels.cpu.backend import StockCpu
from headstart.models import Model
from headstart.models.memory import Footprint
from headstart.state import PrefixCache

FILE = json.loads((Path(__file__).parents[1] / "reference" / "deepseek-v4.json").read_text())
RECORDED = FILE["texts"]
ACCEPTED = ("accepted_draft_tokens", "proposed_draft_tokens")


@by_backend
def loaded(stock: bool = False) -> Model:
    with tempfile.TemporaryDirectory() as folder:
        backend = StockCpu("stock") if stock else None
        return load_model(write_deepseek_v4(Path(folder)), dtype=mx.float32, backend=backend)


@pytest.mark.parametrize("stock", [False, True])
@pytest.mark.parametrize("text", RECORDED)
def test_logits_are_those_of_transformers_past_window_and_budget(text: dict, stock: bool) -> None:
    model, tokens = loaded(stock), mx.array([text["prompt"]])
    logits = np.array(model.logits(model.trunk(tokens, model.make_state(1), certain=tokens.shape[1]))[0])
    for at, expected in text["logits"].items():
        spread = max(expected) - min(expected)
        assert np.abs(logits[int(at)] - np.array(expected)).max() < 1e-4 * spread


@pytest.mark.parametrize(("text", "k"), [*zip(RECORDED, [0, 3], strict=True)])
def test_greedy_text_is_that_of_transformers(text: dict, k: int) -> None:
    answer = generate(loaded(), text["prompt"], max_tokens=len(text["text"]), k=k)
    assert answer.tokens == text["text"]


def test_drafts_are_those_of_transformers_layers_wired_as_in_vllm() -> None:
    model = loaded()
    assert len(FILE["heads"]) == 50
    for each in FILE["heads"]:
        batch = batch_of(model, each["prompt"])
        assert head_drafts(model, batch, len(each["drafts"])).tokens[0].tolist() == each["drafts"]


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


@pytest.mark.parametrize("cuts", [[1] * 24, [3, 15, 7, 23], [32, 15, 1]])
def test_a_prompt_has_the_same_bits_wherever_it_is_cut(cuts: list[int]) -> None:
    """Pieces end within blocks, at their ends, and are shorter and longer than a block or a window."""
    model, tokens = loaded(), mx.array([RECORDED[0]["prompt"][: sum(cuts)]])
    whole = model.trunk(tokens, model.make_state(1), certain=sum(cuts))
    state, found, begin = model.make_state(1), [], 0
    for width in cuts:
        found.append(model.trunk(tokens[:, begin : begin + width], state, certain=width))
        state.commit(mx.array([width]), width)
        begin += width
    assert mx.array_equal(mx.concatenate(found, axis=1), whole)


@pytest.mark.slow  # MLX compiles C++ for each
def test_passes_that_are_remembered_give_the_same_text() -> None:
    prompt, expected = plain(CHUNK)[3]
    found = generate(remembering(loaded()), prompt, max_tokens=24, k=3, **KINDS[3])
    assert found.tokens == expected


def test_output_is_the_same_when_prefixes_are_evicted_and_read_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache has room for one prompt of the two that take turns; then another process finds both on disk."""
    monkeypatch.setattr("headstart.kernels.backend.Backend.chunk", 18)  # no multiple of a block
    model, prompts = loaded(), [random_prompt(loaded(), 40, seed) for seed in (1, 2)]
    expected = [generate(model, p, max_tokens=5, k=0, **kind).tokens for p, kind in zip(prompts, KINDS, strict=False)]
    options = PrefixOptions(folder=tmp_path / "prefixes", folder_bytes=10**8)
    for size in (140_000, 10**8):
        prefix = options.open(size, model)
        prefix.chunk = 18
        engine = Engine(model, prefix=prefix)
        for _ in range(2):
            for prompt, kind, tokens in zip(prompts, KINDS, expected, strict=False):
                answer = collect(submit(engine, prompt, max_tokens=5, k=2, **kind))
                assert answer.tokens == tokens
        stats = prefix.stats()
        assert (stats.evictions > 0) == (size < 10**8)
        prefix.close()
    assert stats.hits > 0
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


def test_caches_in_eight_bits_give_the_same_text_for_every_depth_and_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.kernels.backend.Backend.chunk", 16)
    model, prompt = loaded().with_kv_bits(8), random_prompt(loaded(), 37)
    expected = collect(submit(Engine(model), prompt, max_tokens=10, k=0))
    engine = Engine(model, prefix=PrefixCache(1 << 28, chunk=16, eight_bits=True))
    for _ in range(2):
        answer = collect(submit(engine, prompt, max_tokens=10, k=3))
        assert answer.tokens == expected.tokens
        assert not answer.stats.exact
    assert answer.stats.prefix_cache_hit > 0
    kept = Footprint.of(loaded()).position
    assert Footprint.of(model).position < kept / 2
