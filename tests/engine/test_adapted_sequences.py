"""Sequences with LoRA adapters decode beside others as alone, whatever is drafted, and find their own prefixes."""

from dataclasses import replace
from pathlib import Path

import pytest

import headstart
import headstart.state.disk_prefix
from adapters import write_adapter
from checkpoints import write
from fixtures import Answer, collect, random_prompt
from headstart.checkpoint import load_model
from headstart.engine import Engine, Request
from headstart.engine.prefix_disk import PrefixOptions
from headstart.errors import RequestError
from headstart.models import Model
from headstart.sampling import SamplingParams

C = 16  # tokens a chunk
ADAPTERS = (None, "small", "large", "small", None)
SEEDED = {"temperature": 0.9, "seed": 7}


@pytest.fixture(scope="module", params=["dense", "moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return adapted(tmp_path_factory.mktemp(request.param), request.param)


def adapted(root: Path, family: str, *, seed: int = 1) -> Model:
    folder = write(root / "model", family)
    small = write_adapter(root / "small", folder, seed=seed, scale=1.5)
    large = write_adapter(root / "large", folder, seed=2, rank=16, scale=1.0, num_layers=2)
    return load_model(folder, adapters={"small": small, "large": large})


def ask(engine: Engine, prompt: list[int], adapters: tuple[str | None, ...], **params: object) -> list[Answer]:
    sampling = SamplingParams(**{"max_tokens": 24, **params})  # type: ignore[arg-type]
    handles = [engine.submit(Request(prompt, sampling, adapter=adapter)) for adapter in adapters]
    return [collect(handle) for handle in handles]


@pytest.mark.parametrize(
    ("params", "depths"),
    [
        (SEEDED, (3, "auto")),
        pytest.param({}, (0, 1, 3, "auto"), marks=pytest.mark.slow),
        pytest.param(SEEDED, (0, 1), marks=pytest.mark.slow),
    ],
)
def test_a_mixed_batch_answers_like_each_alone_at_every_k(
    model: Model, params: dict[str, float], depths: tuple[object, ...]
) -> None:
    prompt = random_prompt(model, 20)
    alone = {a: ask(Engine(model), prompt, (a,), k=0, **params)[0].tokens for a in (None, "small", "large")}
    assert len({tuple(tokens) for tokens in alone.values()}) == 3
    for k in depths:
        for adapter, answer in zip(ADAPTERS, ask(Engine(model), prompt, ADAPTERS, k=k, **params), strict=True):
            assert answer.error is None
            assert answer.tokens == alone[adapter], (k, adapter)
            assert answer.stats is not None
            assert (answer.stats.adapter, answer.stats.exact) == (adapter, True)
            assert k != 3 or answer.stats.proposed_draft_tokens, "the head drafts for adapted sequences too"


def test_sequences_that_leave_and_join_keep_their_adapters(model: Model) -> None:
    prompt, engine = random_prompt(model, 20), Engine(model, max_sequences=2)
    lengths = (9, 30, 4, 17, 22)
    sampling = [SamplingParams(max_tokens=length, k=2) for length in lengths]
    pairs = zip(sampling, ADAPTERS, strict=True)
    handles = [engine.submit(Request(prompt, each, adapter=adapter)) for each, adapter in pairs]
    for handle, each, adapter in zip(handles, sampling, ADAPTERS, strict=True):
        alone = Engine(model).submit(Request(prompt, replace(each, k=0), adapter=adapter))
        assert collect(handle).tokens == collect(alone).tokens
    request = Request(prompt, SamplingParams(max_tokens=8, k=2, **SEEDED), adapter="large", n=2)  # type: ignore[arg-type]
    alone = replace(request, params=replace(request.params, k=0))
    both = [[(e.choice, token) for e in Engine(model).submit(r) for token in e.tokens] for r in (request, alone)]
    assert sorted(both[0]) == sorted(both[1])


def test_prefixes_are_those_of_one_adapter(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("headstart.kernels.backend.Backend.chunk", C)
    monkeypatch.setattr(headstart.state.disk_prefix, "MAX_WAITING", 99)  # of a slow disk too, nothing is dropped
    root = tmp_path_factory.mktemp("one")
    model, other = adapted(root / "a", "dense"), adapted(root / "b", "dense", seed=3)
    prompt = random_prompt(model, 3 * C + 5)

    def answers(model: Model) -> list[tuple[list[int], int]]:
        """Of each adapter, twice: a process of its own on one folder."""
        prefix = PrefixOptions(folder=tmp_path / "prefixes", folder_bytes=1 << 28).open(1 << 28, model)
        assert prefix is not None
        prefix.chunk = C
        made = [ask(Engine(model, prefix=prefix), prompt, (a,), k=2)[0] for a in (None, "small", "large") * 2]
        assert prefix.disk is not None
        assert prefix.disk.flush()
        prefix.close()
        return [(each.tokens, each.stats.prefix_cache_hit) for each in made if each.stats is not None]

    expected = [ask(Engine(model), prompt, (a,), k=2)[0].tokens for a in (None, "small", "large")] * 2
    assert answers(model) == list(zip(expected, [0, 0, 0, 3 * C, 3 * C, 3 * C], strict=True))
    assert answers(model) == list(zip(expected, [3 * C] * 6, strict=True)), "from the disk"
    found = answers(other)  # another adapter under a known name
    assert [hit for _, hit in found[:3]] == [0, 0, 0]
    assert found[1][0] != expected[1]


def test_the_library_takes_an_adapter_and_refuses_one_that_is_unknown(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "dense", vocab_size=8192)
    model, tokenizer = headstart.load(folder, adapters={"tune": write_adapter(tmp_path / "a", folder)})
    plain = headstart.generate(model, tokenizer, [3, 5, 7], max_tokens=8)
    tuned = headstart.generate(model, tokenizer, [3, 5, 7], max_tokens=8, adapter="tune")
    assert plain != tuned
    with pytest.raises(RequestError, match="adapter 'none' is unknown: this model has tune"):
        headstart.generate(model, tokenizer, [3, 5, 7], adapter="none")
