"""The reduced head: it scores a part of the vocabulary, and no token of an answer changes by it."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from checkpoints import write
from fixtures import batch_of, builtin_model, collect, generate, random_model, random_prompt, remembering, submit
from headstart.checkpoint import load_model
from headstart.checkpoint.draft_vocabulary import LOWEST, choose_draft_tokens, read_draft_tokens, write_draft_tokens
from headstart.engine import DepthController, Engine
from headstart.engine.copies import CopyIndex
from headstart.engine.depth import Plan
from headstart.engine.draft import Source, head_drafts
from headstart.engine.draft_history import DraftHistory
from headstart.errors import CheckpointError
from headstart.kernels import choose_backend
from headstart.limits import MAX_K
from headstart.models import Model
from headstart.models.draft_vocabulary import DraftVocabulary


@lru_cache
def reduced(name: str = "builtin") -> Model:
    model = builtin_model() if name == "builtin" else random_model(name)
    size = 4096 if name == "builtin" else model.vocabulary // 3
    return model.with_draft_vocabulary(choose_draft_tokens({}, size, model.vocabulary), LOWEST)


class InTurns(DepthController):
    """The reduced head, the full one and none in turns, at another depth each time, with what copies there are."""

    def plan(
        self,
        histories: Sequence[DraftHistory],
        copies: Sequence[CopyIndex | None],
        unread: int = 0,
        most: int = MAX_K,
    ) -> Plan:
        self._round += 1
        distances = tuple(each.distance if each is not None and self._round % 5 else 0 for each in copies)
        source = (Source.REDUCED, Source.HEAD, Source.REDUCED, Source.NONE)[self._round % 4]
        return Plan((3, 8, 1, 5, 2)[self._round % 5], source, distances)


@pytest.mark.parametrize("name", ["builtin", "moe"])
def test_drafts_are_the_best_tokens_of_the_list(name: str) -> None:
    model = reduced(name)
    assert model.draft_vocabulary is not None
    ids = model.draft_vocabulary.ids.tolist()
    hidden = mx.random.normal((2, 3, int(model.config["hidden_size"])), key=mx.random.key(1)).astype(model.dtype)
    some, every = model.draft_logits(hidden, reduced=True), model.draft_logits(hidden)
    listed = every[..., model.draft_vocabulary.ids].astype(mx.float32)
    assert mx.array_equal(some[..., model.draft_vocabulary.ids], listed)  # the same sums, bit for bit
    assert mx.isinf(some).sum().item() == 6 * (model.vocabulary - len(ids))
    best = mx.argmax(listed[:, 0], axis=-1).tolist()
    assert mx.argmax(some[:, 0], axis=-1).tolist() == [ids[i] for i in best]
    batch = batch_of(model, random_prompt(model, 9))
    assert set(head_drafts(model, batch, 5, reduced=True).tokens[0].tolist()) <= set(ids)


def test_greedy_drafts_of_a_graph_are_those_of_the_list() -> None:
    """There the best token of the list is found without the logits of all others."""
    model = random_model("moe")
    model = model.with_draft_vocabulary(list(range(7, model.vocabulary, 3)), LOWEST)
    prompts = [random_prompt(model, length, seed=length) for length in (9, 4)]
    expected = head_drafts(model, batch_of(model, *prompts), 5, reduced=True).tokens.tolist()
    model = remembering(model)
    assert head_drafts(model, batch_of(model, *prompts), 5, reduced=True).tokens.tolist() == expected
    assert model.backend._heads[model.reduced_head][1].seen


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("builtin", {}),
        ("moe", {"temperature": 0.8, "seed": 3}),
        ("moe", {"repetition_penalty": 1.2}),
        pytest.param("builtin", {"temperature": 0.8, "seed": 3}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_answer_is_the_same_with_every_source_in_turns(name: str, how: dict[str, object]) -> None:
    model = reduced(name)
    engine = Engine(model, depth=InTurns())
    prompts = [2 * random_prompt(model, length, length) for length in (5, 12)]
    handles = [submit(engine, prompt, max_tokens=16, **how) for prompt in prompts]
    answers = [collect(handle) for handle in handles]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == generate(model, prompt, max_tokens=16, **{**how, "k": 0}).tokens
    assert min(sum(a.stats.proposed_by_source[source] for a in answers) for source in ("head", "copy")) > 0


@pytest.mark.parametrize("kind", ["linear", "embedding"])
def test_quantised_rows_are_gathered_as_they_are(kind: str) -> None:
    layer = nn.Linear(64, 192, bias=False) if kind == "linear" else nn.Embedding(192, 64)
    packed = layer.to_quantized(group_size=32, bits=4)
    x = mx.random.normal((1, 1, 64), key=mx.random.key(1))
    listed = DraftVocabulary.of(packed, list(range(0, 192, 3)), "every third")
    assert mx.array_equal(choose_backend().product(x, listed.lm_head), choose_backend().product(x, packed)[..., ::3])
    assert packed.weight.shape[0] == 192


def test_the_list_holds_the_most_frequent_tokens_and_then_the_lowest_ids() -> None:
    assert choose_draft_tokens({7: 5, 9: 1, 100: 9, 2: 1}, 5, 50) == [0, 1, 2, 7, 9]
    assert choose_draft_tokens({7: 5, 9: 1, 3: 2}, 2, 50) == [3, 7]
    assert choose_draft_tokens({}, 100, 4) == [0, 1, 2, 3]


def test_a_model_is_loaded_with_the_list_beside_it(tmp_path: Path) -> None:
    write(tmp_path, "dense")
    assert load_model(tmp_path).draft_vocabulary is None
    vocabulary = load_model(tmp_path).vocabulary
    path = write_draft_tokens(tmp_path, [5, 2, 9], "a test", vocabulary)
    listed = load_model(tmp_path).draft_vocabulary
    assert listed is not None
    assert (listed.ids.tolist(), listed.origin) == ([5, 2, 9], "a test")
    assert load_model(tmp_path, mtp=False).draft_vocabulary is None
    for ids in ("[3, 3]", "[]", "[-1]", "[64]", "[1.5]", "[true]", '"12"', '["5"]', "{}"):
        path.write_text(f'{{"ids": {ids}, "vocabulary": 64, "origin": ""}}')
        with pytest.raises(CheckpointError, match=r"draft_vocabulary\.json: ids must be different tokens below 64"):
            read_draft_tokens(tmp_path, 64)
    number = b'{"ids": 3, "vocabulary": 64, "origin": ""}'
    for wrong in (b"", b"[", b"\xff", b"7", b'{"ids": [1]}', number, b"[" * 10**5):
        path.write_bytes(wrong)
        with pytest.raises(CheckpointError, match=r"draft_vocabulary\.json: not a list of tokens .* Delete it"):
            read_draft_tokens(tmp_path, 64)
    write_draft_tokens(tmp_path, [5, 2, 9], "another model's", vocabulary + 1)
    with pytest.raises(CheckpointError, match=f"made for {vocabulary + 1} tokens; this model has {vocabulary}"):
        load_model(tmp_path)


def calibrated(full: float, some: float) -> DepthController:
    depth = DepthController(sources=[Source.HEAD, Source.REDUCED])
    times = {(1, k): [1 + (0.1 + full) * k] for k in (0, 1, 3, 7)}
    depth.step_time.calibrate(times | {(1, 3, Source.REDUCED): [1 + 3 * (0.1 + some)]})
    return depth


def test_the_controller_uses_the_better_head() -> None:
    history = DraftHistory()
    for full, some, inside, expected in (
        (0.3, 0.1, 100, Source.REDUCED),  # cheaper, and knows every token
        (0.3, 0.1, 30, Source.HEAD),  # cheaper, but knows few
        (0.11, 0.1, 80, Source.HEAD),  # hardly cheaper
    ):
        depth = calibrated(full, some)
        for _ in range(60):
            depth.observe_coverage(inside, 100)
            depth.observe([history], 3, [(3, 3)], None)
        plan = depth.plan([history], [None])
        assert plan.k > 0
        assert plan.source == expected, (full, inside)


def test_a_head_that_became_faster_is_found() -> None:
    """Both heads are explored: calibration alone would keep the full one."""
    depth, history, used = calibrated(0.3, 0.4), DraftHistory(), []
    depth.coverage = 1.0
    for _ in range(600):
        k, source, _ = plan = depth.plan([history], [None])
        used.append(plan)
        depth.observe([history], k, [(k, k)], 1 + k * (0.2 if source == Source.REDUCED else 0.4), source)
    assert used[0].source == Source.HEAD
    assert sum(plan.source == Source.REDUCED for plan in used[-50:]) > 40


def test_a_token_outside_the_list_does_not_count_against_the_full_head() -> None:
    model = reduced("moe")
    engine = Engine(model, depth=InTurns(sources=[Source.REDUCED]))
    collect(submit(engine, random_prompt(model, 9), max_tokens=30))
    assert engine.depth.coverage < 0.85  # a third of the tokens are in the list
