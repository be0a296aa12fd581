"""Copies from the context: what is found, what the device proposes, and that no token changes by it."""

import random
import sys
from collections.abc import Sequence

import mlx.core as mx
import pytest

from fixtures import (
    batch_of,
    builtin_model,
    collect,
    generate,
    mlx_lm_greedy,
    random_model,
    random_prompt,
    submit,
)  # fmt: skip
from headstart.engine import DepthController, Engine, Request
from headstart.engine.copies import MATCH, CopyIndex
from headstart.engine.depth import Plan
from headstart.engine.draft import Source, copy_drafts
from headstart.engine.draft_history import DraftHistory
from headstart.engine.step import step
from headstart.limits import MAX_K
from headstart.models import Model
from headstart.sampling import GrammarSpec, SamplingParams
from headstart.state import PrefixCache

# The index


def fed(tokens: Sequence[int], step: int) -> CopyIndex:
    """An index that is given the first MATCH + 1 tokens as a prompt, and then `step` more at a time."""
    index, pool = CopyIndex(), DraftHistory()
    for end in [*range(MATCH + 1, len(tokens), step), len(tokens)]:
        index.update(list(tokens[:end]), pool)
    return index


def longest_possible(tokens: Sequence[int], distance: int) -> int:
    n = 0
    while n + distance < len(tokens) and tokens[-1 - n] == tokens[-1 - n - distance]:
        n += 1
    return n


def test_the_newest_tokens_are_found_where_they_occurred_last() -> None:
    index = fed([1, 2, 3, 4, 5, 1, 2, 3], step=1)
    assert (index.distance, index.length) == (5, MATCH)
    index = fed([1, 2, 3, 4, 1, 2, 3, 5, 6, 1, 2, 3, 5, 6], step=2)
    assert (index.distance, index.length) == (5, MATCH + 2)
    assert fed([1, 2, 3, 4, 5, 1, 2, 3, 9], step=1).distance == 0
    assert fed([7] * 6, step=1).distance == 1


def test_an_index_finds_the_same_however_the_tokens_come() -> None:
    rng = random.Random(0)
    for _ in range(60):
        tokens = [rng.randrange(3) for _ in range(rng.randint(MATCH + 1, 60))]
        one, several = fed(tokens, step=1), fed(tokens, step=5)
        assert (one.distance, one.length) == (several.distance, several.length)
        if one.distance:
            assert MATCH <= one.length <= longest_possible(tokens, one.distance)
        else:
            newest = tokens[-MATCH:]
            assert all(tokens[i : i + MATCH] != newest for i in range(len(tokens) - MATCH))
        prompt = CopyIndex()
        prompt.update(tokens, DraftHistory())
        assert bool(prompt.distance) == bool(one.distance)


def test_tokens_that_share_a_hash_are_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.engine.copies.hash", lambda tokens: 0, raising=False)
    assert fed([1, 2, 3, 4, 5, 6, 7, 8], step=1).distance == 0
    assert fed([4, 4, 4, 4, 4], step=1).distance == 1


def test_the_memory_of_an_index_is_linear() -> None:
    sizes = []
    for count in (1000, 10_000):
        index = fed(random.Random(1).choices(range(50_000), k=count), step=7)
        sizes.append(sys.getsizeof(index._positions) + sum(map(sys.getsizeof, index._positions)))
    assert sizes[1] < 16 * sizes[0]
    assert sizes[1] < 200 * 10_000


def test_chances_follow_how_often_copies_went_on() -> None:
    pool, wrong = DraftHistory(memory=0.997), CopyIndex()
    rng, noise = random.Random(2), list(range(100))
    while len(noise) < 400:  # repeats three tokens and goes on otherwise
        at = rng.randrange(90)
        noise += [*range(at, at + MATCH), 1000 + len(noise)]
    for end in range(100, len(noise)):
        wrong.update(noise[:end], pool)
    wrong.update([*noise, 1, 2, 3], pool)
    assert wrong.distance
    assert wrong.survival(pool)[0] < 0.2
    assert wrong.survival(pool, unread=2) == pytest.approx([*wrong.survival(pool)[2:], *wrong.survival(pool, 2)[-2:]])
    right = fed([*range(200), *range(8)], step=1)
    assert right.survival(pool)[0] > 0.5
    assert len(right.survival(pool)) == MAX_K
    assert CopyIndex().survival(pool) == []


def test_a_prompt_that_ends_in_a_repetition_is_a_long_match() -> None:
    index = CopyIndex()
    index.update([*range(40), *range(30)], DraftHistory())
    assert (index.distance, index.length) == (40, 30)


# The device


def test_drafts_are_what_followed_and_end_where_the_match_ends() -> None:
    model = random_model("dense")
    repeats, periodic, other = [5, 6, 7, 8, 9, 10, 11, 5, 6, 7], [1, 2, 1, 2, 1, 2, 1, 2], [5, 6, 7, 8, 9, 4, 5, 6, 3]
    batch = batch_of(model, repeats, periodic, other, repeats)
    drafts = copy_drafts(batch, 5, [7, 2, 6, 0])
    assert drafts.tolist() == [[8, 9, 10, 11, 5], [1, 2, 1, 2, 1], [-1] * 5, [-1] * 5]
    assert copy_drafts(batch, 2, [3, 4, 100, 7]).tolist() == [[-1, -1], [1, 2], [-1, -1], [8, 9]]


def test_the_device_keeps_every_token_of_every_sequence() -> None:
    """Through drafts that are rejected, sequences that join and leave, and new blocks."""
    model = random_model("dense")
    prompts = [random_prompt(model, length, length) for length in (3, 250, 40)]
    batch = batch_of(model, *prompts[:2])
    said = [list(prompt) for prompt in prompts]
    rows = [0, 1]
    for number, k in enumerate([3, 8, 0, 5, 8, 8, 2, 8, 8, 1]):
        if number == 3:
            batch.join(batch_of(model, prompts[2]), model)
            rows = [0, 1, 2]
        if number == 6:
            batch.keep([2, 1], model)
            rows = [2, 1]
        result = step(model, batch, k)
        mx.eval(result, batch.arrays())
        for row, accepted in enumerate(result.verdict.accepted.tolist()):
            said[rows[row]] += result.verdict.tokens[row, : accepted + 1].tolist()
        for row, length in enumerate(batch.trunk_state.lengths.tolist()):
            assert batch.history[row, : length + 1].tolist() == said[rows[row]]


# The engine


class Eager(DepthController):
    """Copies wherever something repeats, right or wrong, in turns with the head and beside it."""

    def plan(
        self,
        histories: Sequence[DraftHistory],
        copies: Sequence[CopyIndex | None],
        unread: int = 0,
        most: int = MAX_K,
    ) -> Plan:
        self._round += 1
        distances = tuple(each.distance if each is not None else 0 for each in copies)
        return Plan(
            (3, 8, 1, 5, 0, 2)[self._round % 6], source=self.max_k > 0 and self._round % 3 == 0, distances=distances
        )


HOW: dict[str, dict[str, object]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 5},
    "seeded, truncated": {"temperature": 0.8, "seed": 5, "top_p": 0.9, "top_k": 20},
    "penalised": {"repetition_penalty": 1.1, "frequency_penalty": 0.3},
    "seeded, penalised": {"temperature": 0.7, "seed": 1, "presence_penalty": 0.5, "presence_context_size": None},
    "ended early": {"max_tokens": 17},
}


def repeated(model: Model, length: int, seed: int) -> list[int]:
    """A prompt that ends in the middle of a repetition."""
    tokens = random_prompt(model, length, seed)
    return [*tokens, *tokens[: length // 2]]


def run(model: Model, requests: Sequence[tuple[list[int], dict[str, object]]], **engine: object) -> list[list[int]]:
    running = Engine(model, depth=Eager(model.max_k), **engine)  # type: ignore[arg-type]
    handles = [submit(running, prompt, **{"max_tokens": 40, **how}) for prompt, how in requests]
    answers = [collect(handle) for handle in handles]
    assert all(answer.error is None for answer in answers)
    assert sum(answer.stats.proposed_copies for answer in answers) > 0
    return [answer.tokens for answer in answers]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "seeded, penalised" else pytest.mark.slow) for name in HOW],
)
def test_an_answer_is_the_same_with_copies_alone_and_in_a_batch(name: str) -> None:
    model = random_model("dense")
    requests = [
        (repeated(model, length, length), {**HOW[name], "max_tokens": 40 - length % 7}) for length in (8, 21, 40)
    ]
    expected = [generate(model, prompt, **{**how, "k": 0}).tokens for prompt, how in requests]
    assert run(model, requests) == expected
    assert [run(model, [request])[0] for request in requests] == expected
    mixed = [*requests, (random_prompt(model, 9), {"k": 3}), (random_prompt(model, 9), {"k": 0})]
    assert run(model, mixed, max_sequences=2)[:3] == expected  # the others join and leave


@pytest.mark.parametrize("name", ["greedy", pytest.param("seeded", marks=pytest.mark.slow)])
def test_an_answer_of_the_builtin_model_is_the_same_with_copies_that_are_right(name: str) -> None:
    model = builtin_model()
    prompt = [*random_prompt(model, 20, 3), *[900, 31, 7, 45, 12, 88] * 6]
    how = HOW[name]
    engine = Engine(model, depth=Eager(model.max_k))
    answer = collect(submit(engine, prompt, max_tokens=48, **how))
    assert answer.tokens == generate(model, prompt, max_tokens=48, **{**how, "k": 0}).tokens
    if name == "greedy":
        assert answer.stats.accepted_copies > 10
    assert answer.origins.count("copy") == answer.stats.accepted_copies
    assert answer.origins.count("draft") == answer.stats.accepted_by_source["head"]


def test_unseeded_answers_with_copies_end_as_they_should() -> None:
    """That their law is the target's is shown in tests/sampling."""
    model = random_model("dense")
    run(model, [(repeated(model, 12, n), {"temperature": 1.0}) for n in range(3)])


def test_an_answer_is_the_same_with_copies_after_a_prefix_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.kernels.backend.Backend.chunk", 16)
    model = random_model("dense")
    prompt = repeated(model, 44, 1)
    engine = Engine(model, depth=Eager(model.max_k), prefix=PrefixCache(10**8, chunk=16))
    answers = [collect(submit(engine, prompt, max_tokens=40)) for _ in range(2)]
    assert answers[1].stats.prefix_cache_hit > 0
    assert answers[1].stats.proposed_copies > 0
    assert [answer.tokens for answer in answers] == [mlx_lm_greedy(model, prompt, 40)] * 2


def test_an_answer_is_the_same_with_copies_when_it_is_recomputed() -> None:
    model = random_model("dense")
    prompt = repeated(model, 20, 1)
    engine = Engine(model, depth=Eager(model.max_k))
    handle = submit(engine, prompt, max_tokens=40)
    for _ in range(9):
        engine.run_once()
    engine.recovery.recompute_all()
    answer = collect(handle)
    assert answer.tokens == mlx_lm_greedy(model, prompt, 40)
    assert answer.stats.proposed_copies > 0


def test_several_answers_to_a_prompt_copy_each_for_itself() -> None:
    model = random_model("dense")
    prompt, answers = repeated(model, 20, 4), []
    for k, depth in ((0, None), ("auto", Eager(model.max_k))):
        said: list[list[int]] = [[], []]
        params = SamplingParams(temperature=1.0, seed=3, max_tokens=30, k=k)
        for event in Engine(model, depth=depth).submit(Request(prompt, params, n=2)):
            said[event.choice] += event.tokens
        answers.append(said)
    assert answers[0] == answers[1]


def test_a_grammar_comes_before_copies() -> None:
    from headstart import load

    model, tokenizer = load()
    prompt = tokenizer.encode("12 34 12 34 12 34 12 34 12 34 12 34 ")
    how = {"grammar": GrammarSpec("regex", "([0-9]{2} ){9}"), "max_tokens": 24}
    texts = []
    for k, depth in ((0, None), ("auto", Eager(model.max_k))):
        engine = Engine(model, tokenizer, depth=depth)
        texts.append(collect(submit(engine, prompt, k=k, **how)).tokens)
    assert texts[0] == texts[1]


def test_a_model_without_a_head_copies() -> None:
    model = random_model("dense", head=False)
    prompts = [repeated(model, length, length) for length in (8, 21)]
    assert run(model, [(prompt, {}) for prompt in prompts]) == [
        mlx_lm_greedy(model, prompt, 40) for prompt in prompts
    ]
    answer = generate(model, [3, 4, 5, 6] * 8, max_tokens=30)
    assert answer.tokens == mlx_lm_greedy(model, [3, 4, 5, 6] * 8, 30)
    assert (answer.stats.drafter_kind, answer.stats.bypass_reason) == ("copy", model.head_unavailable)


def test_nothing_is_copied_at_a_fixed_depth_or_by_the_optimistic_rule() -> None:
    """A fixed depth asks for the head; what is accepted unseen would be copied without end."""
    model = random_model("dense")
    for how in ({"k": 3}, {"k": 0}, {"accept": "optimistic", "temperature": 1.0}):
        engine = Engine(model, depth=Eager(model.max_k))
        stats = collect(submit(engine, repeated(model, 20, 1), max_tokens=20, **how)).stats
        assert stats.proposed_copies == 0


# The controller


def calibrated(position: float, draft: float) -> DepthController:
    depth = DepthController()
    cells = {(1, k): [1 + (position + draft) * k] for k in (0, 1, 3, 7)}
    depth.step_time.calibrate(cells | {(1, 7, False): [1 + 7 * position]})
    return depth


def trusted() -> CopyIndex:
    return fed([*range(60), *range(50)], step=1)


def test_a_copy_that_goes_on_is_drafted_without_the_head() -> None:
    plan = calibrated(0.1, 0.1).plan([DraftHistory()], [trusted()])
    assert plan == Plan(MAX_K, Source.NONE, distances=(60,))


def test_a_copy_is_left_alone_where_the_head_earns_more() -> None:
    depth, head = calibrated(0.5, 0.0), DraftHistory()
    for _ in range(30):
        depth.observe([head], 3, [(3, 3)], None)
    short = fed([1, 2, 3, 4, 5, 1, 2, 3], step=1)
    plan = depth.plan([head], [short])
    assert plan.source
    assert plan.distances == ()


def test_in_a_mixed_batch_the_head_drafts_for_those_that_do_not_copy() -> None:
    depth = calibrated(0.05, 0.02)
    good, bad = DraftHistory(), DraftHistory()
    for _ in range(30):
        depth.observe([good, bad], 3, [(3, 3), (0, 3)], None)
    plan = depth.plan([good, good, bad], [None, None, trusted()])
    assert plan.source
    assert plan.distances == (0, 0, 60)


def test_steps_of_copies_have_times_of_their_own() -> None:
    depth = calibrated(0.1, 0.3)
    with_head, alone = depth.step_time.seconds(1, 5), depth.step_time.seconds(1, 5, Source.NONE)
    assert alone == pytest.approx(1.5, rel=0.1)
    assert with_head == pytest.approx(3.0, rel=0.1)
    for _ in range(6):
        depth.observe([DraftHistory()], 5, [(5, 0)], 2.0, Source.NONE)
    assert depth.step_time.seconds(1, 5, Source.NONE) > 1.2 * alone
