"""Constrained decoding: what a grammar promises, on the built-in model with its real tokenizer."""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import jsonschema
import mlx.core as mx
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from random_schemas import Schema, random_schema, real_schemas

from fixtures import builtin_model, random_model
from headstart.checkpoint import load_tokenizer, resolve
from headstart.engine import Engine, Event, Handle, Request
from headstart.errors import HeadstartError, RequestError
from headstart.kernels import Backend
from headstart.models import Model
from headstart.sampling import (
    BatchContext,
    GrammarMasks,
    GrammarSpec,
    Matcher,
    Proposal,
    SamplingParams,
    SequenceParams,
    compile_grammar,
    controls,
)

PROMPT = "def read_config(path):\n"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["alpha", "beta"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "kind", "n"],
    "additionalProperties": False,
}
JSON = GrammarSpec.json_schema(PERSON)
REGEX = GrammarSpec("regex", r"(foo|bar|foobar) = [0-9]{1,3}(, and a tail)?")
OBJECT = GrammarSpec("json_object")
LARK = GrammarSpec("lark", 'start: "SELECT " column ("," column)~0..2 ";"\ncolumn: /[a-z]{1,9}/ | "COUNT(*)"')
# Words that no head expects in this order: whatever is drafted right was forced.
CERTAIN = GrammarSpec("regex", "zebra quux xylophone marmalade kumquat yodel")


@lru_cache
def blanks() -> dict[int, float]:
    """A bias against tokens of nothing but white space: the answers come out short."""
    pieces = {token: tokenizer().decode([token]) for token in range(builtin_model().vocabulary)}
    return {token: -100.0 for token, piece in pieces.items() if piece and not piece.strip()}


@lru_cache
def tokenizer() -> TokenizerWrapper:
    return load_tokenizer(resolve("tiny-qwen3.5"))


def submit(engine: Engine, grammar: GrammarSpec | None, prompt: str = PROMPT, **params: Any) -> Handle:
    params = {"max_tokens": 60, "k": 3} | params
    return engine.submit(Request(tokenizer().encode(prompt), SamplingParams(grammar=grammar, **params)))


class Answer:
    def __init__(self, events: Sequence[Event]):
        self.bursts = [event.tokens for event in events if event.tokens]
        self.tokens = [token for event in events for token in event.tokens]
        self.origins = [origin for event in events for origin in event.origins]
        self.text = "".join(text for event in events for text in event.texts)
        self.reason, self.error, self.stats = events[-1].finish_reason, events[-1].error, events[-1].stats


def tiny_model() -> Model:
    """Random, with the built-in model's vocabulary and a fifth of its cost. Only a grammar makes sense of it."""
    return random_model("dense", vocab_size=builtin_model().vocabulary)


def answers(rows: Sequence[tuple[GrammarSpec | None, dict[str, Any]]], model: Model | None = None) -> list[Answer]:
    """Of sequences that decode together."""
    engine = Engine(model or tiny_model(), tokenizer())
    return [Answer(list(handle)) for handle in [submit(engine, grammar, **params) for grammar, params in rows]]


def matcher_of(grammar: GrammarSpec, stop_ids: Sequence[int] = (), vocabulary: int | None = None) -> Matcher:
    ends = {*tokenizer().eos_token_ids, *stop_ids}
    return compile_grammar(grammar, tokenizer()).matcher(ends, vocabulary or builtin_model().vocabulary)


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def permitted(mask: bytes) -> set[int]:
    bits = int.from_bytes(mask, "little")
    return {token for token in range(len(mask) * 8) if bits >> token & 1}


# What is said


def test_a_completed_answer_follows_its_grammar() -> None:
    ways: list[dict[str, Any]] = [{}, {"temperature": 0.8}]
    short = {JSON: blanks(), OBJECT: {ids("}")[0]: 9.0}}
    specs = (JSON, REGEX, LARK, OBJECT)
    rows = [(spec, {"max_tokens": 28, "logit_bias": short.get(spec, {}), **way}) for spec in specs for way in ways]
    told = answers(rows, builtin_model())
    done = [(spec, answer.text) for (spec, _), answer in zip(rows, told, strict=True) if answer.reason == "stop"]
    assert {spec for spec, _ in done} == set(specs)
    assert {answer.reason for answer in told} <= {"stop", "length"}
    for spec, text in done:
        if spec is REGEX:
            assert re.fullmatch(spec.source, text)
        elif spec is LARK:
            assert re.fullmatch(r"SELECT ([a-z]{1,9}|COUNT\(\*\))(,([a-z]{1,9}|COUNT\(\*\))){0,2};", text)
        else:
            jsonschema.validate(json.loads(text), PERSON if spec is JSON else {"type": "object"})


def test_a_grammar_may_force_the_text_of_an_added_token() -> None:
    specs = [GrammarSpec("json_schema", '{"const": "x</think>"}'), GrammarSpec("regex", r"a<\|im_end\|>b")]
    told = answers([(spec, {"max_tokens": 20, "k": k}) for spec in specs for k in (0, 3)])
    assert [answer.reason for answer in told] == ["stop"] * 4
    assert [answer.text for answer in told] == ['"x</think>"'] * 2 + ["a<|im_end|>b"] * 2


@pytest.mark.parametrize("gap", ["", " ", "\n", "\n    ", "\n\t\t"])
def test_json_may_have_one_space_or_a_new_line_and_its_indentation(gap: str) -> None:
    tokens = ids("{" + gap + '"name"')
    assert matcher_of(JSON).advance(tokens) == len(tokens)


@pytest.mark.parametrize("gap", ["  ", "\t", "\n\n", "\n \n", "\n" + " " * 40])
def test_json_has_no_longer_gaps(gap: str) -> None:
    """A model could spend all its tokens on them."""
    tokens = ids("{" + gap + '"name"')
    assert matcher_of(JSON).advance(tokens) < len(tokens)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param({}, id="greedy", marks=pytest.mark.slow),
        pytest.param({"temperature": 0.9, "seed": 5}, id="seeded"),
    ],
)
def test_an_answer_is_the_same_for_every_k_alone_and_in_a_batch(way: dict[str, Any]) -> None:
    spec = GrammarSpec("regex", r"(red|green|blue)berr(y|ies) cost [0-9]{1,3} pence( each)?")
    rows = [(spec, {"k": k, "max_tokens": 24, **way}) for k in range(9)]
    together = answers([*rows, (JSON, {"max_tokens": 6, "temperature": 0.7}), (None, {"max_tokens": 9})])[:9]
    (alone,) = answers(rows[3:4])
    assert re.fullmatch(spec.source, alone.text)
    assert {answer.text for answer in together} == {alone.text}
    assert all((answer.tokens, answer.reason) == (alone.tokens, "stop") for answer in together)


@pytest.mark.slow  # the test above has it on a random model
@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0])
def test_a_seeded_answer_of_the_builtin_model_is_the_same_for_every_k(temperature: float) -> None:
    way = {"temperature": temperature, "seed": 11, "repetition_penalty": 1.1, "max_tokens": 16}
    depths = (0, 1, 3, 8)
    together = answers([(JSON, {"k": k, **way}) for k in depths], builtin_model())
    (alone,) = answers([(JSON, {"k": 2, **way})], builtin_model())
    assert [answer.tokens for answer in together] == [alone.tokens] * len(depths)


def test_a_sequence_without_grammar_generates_the_same_beside_one_with() -> None:
    plain: list[tuple[GrammarSpec | None, dict[str, Any]]]
    plain = [(None, {"max_tokens": 20}), (None, {"max_tokens": 20, "temperature": 0.8, "seed": 4})]
    beside = answers([*plain, (JSON, {"temperature": 0.8})])
    assert [a.tokens for a in beside[:2]] == [a.tokens for a in answers(plain)]
    assert len(set(map(str, [a.tokens for a in beside]))) == 3


def test_nothing_follows_a_complete_grammar() -> None:
    text = CERTAIN.source
    for answer in answers([(CERTAIN, {"k": 0}), (CERTAIN, {"k": 5}), (CERTAIN, {"k": 5, "min_tokens": 59})]):
        assert (answer.text, answer.reason, answer.tokens) == (text, "stop", ids(text))


def test_a_grammar_that_may_end_leaves_the_end_to_the_model() -> None:
    """Any stop id, the tokenizer's or the request's, and only where the grammar could end."""
    stop = ids("!")[0]
    often = {stop: 100.0, ids("\n")[0]: -100.0}
    (answer,) = answers([(GrammarSpec("regex", "[ab]{3}[a-z]*"), {"stop_ids": [stop], "logit_bias": often})])
    assert answer.reason == "stop"
    assert answer.tokens[-1] == stop
    assert re.fullmatch("[ab]{3}[a-z]*", answer.text)
    assert stop not in answer.tokens[:-1]


# Drafts


@pytest.mark.parametrize("way", [{}, {"temperature": 1.0, "seed": 2}, {"temperature": 1.0}], ids=str)
def test_forced_tokens_are_accepted_drafts(way: dict[str, Any]) -> None:
    answer, _ = answers([(CERTAIN, {"k": 3, **way}), (None, {"max_tokens": 8, **way})])
    assert answer.stats is not None
    whole, rest = divmod(len(answer.tokens), 4)
    assert answer.origins == ["draft", "draft", "draft", "bonus"] * whole + ["draft"] * rest
    assert answer.stats.rounds == whole + bool(rest)


def test_a_forced_draft_is_proposed_with_certainty_and_others_as_the_head_drew_them() -> None:
    scene = BatchContext(
        controls([SequenceParams(SamplingParams(temperature=1.0), key, 0, 9) for key in (1, 2)], 8),
        lengths=mx.array([2, 2]),
        rounds=mx.array([0, 0]),
        recent=mx.zeros((2, 0), mx.int32),
        remaining=mx.array([9, 9]),
    )
    nothing = Proposal.none(2)
    free = Backend().propose(mx.zeros((2, 1, 8)), nothing, scene)
    other = (free.tokens[0, 0].item() + 1) % 8  # type: ignore[operator]
    bound = Backend().propose(mx.zeros((2, 1, 8)), nothing, scene, mx.array([[other], [-1]]))
    assert bound.tokens.tolist() == [[other], free.tokens[1].tolist()]
    assert bound.sources[0][0].tolist() == [
        [[float(token == other) for token in range(8)]],
        free.sources[0][0][1].tolist(),
    ]


def test_a_draft_that_the_grammar_forbids_is_a_rejection() -> None:
    """The window stays as wide as k and the limit let it be: all drafts were proposed, and most were corrected."""
    (answer,) = answers([(GrammarSpec("regex", "([0-9]{5} ){9}"), {"max_tokens": 12, "k": 2})])
    said, proposed = 0, 0
    for burst in answer.bursts:
        said, proposed = said + len(burst), proposed + min(2, 12 - said - 1)
    assert answer.stats is not None
    assert answer.stats.proposed_draft_tokens == proposed
    assert answer.origins.count("correction") > 5


def test_optimistic_acceptance_stops_at_a_forbidden_draft() -> None:
    spec = GrammarSpec("regex", "[0-9 ]{30}")
    (answer,) = answers([(spec, {"accept": "optimistic", "temperature": 1.0, "max_tokens": 12})])
    assert answer.error is None
    assert re.fullmatch("[0-9 ]{1,30}", answer.text)


# Masks


def test_a_mask_permits_exactly_the_tokens_that_can_follow() -> None:
    """Against the language itself, all of it written out: a token can follow if some word goes on that way. Where
    the next bytes are certain, llguidance keeps to the tokenizer's own way of cutting them."""
    words = {"".join(w) for w in product(("foo", "fo"), ("bar", "", "!"), ("12", "1", "x"))}
    spec = GrammarSpec("regex", "(foo|fo)(bar|!)?(12|1|x)")
    ends = set(tokenizer().eos_token_ids)
    pieces = {token: tokenizer().decode([token]) for token in range(builtin_model().vocabulary)}
    drafts = [ids("f")[0], ids("o")[0], ids("b")[0], ids("ar")[0], ids("1")[0], ids("2")[0]]
    matcher = matcher_of(spec)
    masks = matcher.masks(drafts)
    assert len(masks) == 7
    text = ""
    for mask, draft in zip(masks, [*drafts, None], strict=True):
        can = {token for token, piece in pieces.items() if piece and any(w.startswith(text + piece) for w in words)}
        can = can - ends | (ends if text in words else set())
        got = permitted(mask)
        assert got <= can
        assert got == can or text == "fob"  # then "ar" is certain
        assert got
        text += pieces[draft] if draft is not None else ""
    assert permitted(masks[3]) == {ids("ar")[0]}


def test_computing_masks_ahead_leaves_no_trace() -> None:
    matcher, fresh = matcher_of(JSON), matcher_of(JSON)
    for text in ('{"', "name", '":"', "x", '", "'):
        matcher.masks([*ids(text), 5, 6])
        matcher.masks([7, *ids('"}')])
        matcher.forced(4)
        for token in ids(text):
            assert matcher.masks([]) == fresh.masks([])
            assert matcher.advance([token]) == fresh.advance([token]) == 1
    assert matcher.forced(9) == fresh.forced(9) != []


def test_masks_end_behind_a_forbidden_draft_and_behind_an_end() -> None:
    (eos,) = {tokenizer().eos_token_id}
    matcher = matcher_of(GrammarSpec("regex", "ab+"))
    assert len(matcher.masks([*ids("ab"), *ids("q"), *ids("b")])) == 2
    assert len(matcher.masks([*ids("a"), *ids("b")])) == 1, "the grammar forces one token"
    assert len(matcher.masks([eos, eos])) == 1
    matcher.advance(ids("ab"))
    assert len(matcher.masks([eos, eos])) == 1
    assert eos in permitted(matcher.masks([])[0])


def test_rows_share_one_mask_and_ids_beyond_the_tokenizer_are_forbidden() -> None:
    vocabulary = builtin_model().vocabulary + 37
    guided, drafts = (
        matcher_of(GrammarSpec("regex", "[ab]+"), vocabulary=vocabulary),
        mx.array([[5, 5], [*ids("ab"), 5]]),
    )
    mask = GrammarMasks([None, guided], vocabulary).permitted(drafts)
    assert mask.shape == (2, 3, vocabulary)
    assert mask[0].all().item()
    again = matcher_of(GrammarSpec("regex", "[ab]+"), vocabulary=vocabulary)
    for here in (0, 1):
        assert {i for i, yes in enumerate(mask[1, here].tolist()) if yes} == permitted(again.masks([])[0])
        again.advance(ids("ab"))
    assert not mask[1, :2, builtin_model().vocabulary :].any().item()
    assert mask[1, 2].all().item()  # behind a forbidden draft: does not matter, and must not be empty


# What goes wrong


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (GrammarSpec("regex", "a(b"), "unclosed group"),
        (GrammarSpec("regex", "[^\\s\\S]"), "NoExtension"),
        (GrammarSpec("regex", ""), "empty answer"),
        (GrammarSpec("lark", "start: nowhere"), "unknown name"),
        (GrammarSpec("json_schema", '{"type":"strin"}'), "Invalid type"),
        (GrammarSpec("json_schema", '{"type":'), "Expecting value"),
        (GrammarSpec("json_schema", "5"), "must be an object"),
        (GrammarSpec.json_schema({"not": {"type": "string"}}), "Unimplemented"),
        (GrammarSpec.json_schema(False), "Unsatisfiable"),
        (GrammarSpec.json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable"),
    ],
)
def test_an_invalid_grammar_is_refused_before_any_work(spec: GrammarSpec, reason: str) -> None:
    engine = Engine(builtin_model(), tokenizer())
    with pytest.raises(RequestError, match=f"^grammar .*{spec.kind}(.|\n)*{reason}"):
        submit(engine, spec)
    assert not engine.run_once()


def test_what_is_no_grammar_is_refused_by_name() -> None:
    for build in (
        lambda: GrammarSpec("yaml", "x"),  # type: ignore[arg-type]
        lambda: GrammarSpec("regex", {"a": 1}),  # type: ignore[arg-type]
        lambda: GrammarSpec.json_schema("{nope"),
        lambda: GrammarSpec.json_schema({"a": object()}),
        lambda: SamplingParams(grammar={"type": "object"}),  # type: ignore[arg-type]
        lambda: submit(Engine(builtin_model()), JSON),
    ):
        with pytest.raises(RequestError, match=r"^grammar "):
            build()


def test_a_sequence_whose_grammar_leads_nowhere_ends_alone_with_what_it_generated() -> None:
    """The request's own stop id is what the grammar needs next, where it may not end."""
    needed = ids("!")[0]
    matcher = matcher_of(GrammarSpec("regex", "[ab]{2}!c"), stop_ids=[needed])
    assert (matcher.advance(ids("ab")), matcher.failed) == (len(ids("ab")), None)
    assert (matcher.masks([]), matcher.advance([needed])) == ([], 0)
    assert matcher.failed is not None
    spec, ways = GrammarSpec("regex", "[ab]{2}!c"), [{"k": 0}, {"k": 3}, {"k": 3, "temperature": 0.9}]
    *stuck, beside = answers([*[(spec, {"stop_ids": [needed], **way}) for way in ways], (None, {"max_tokens": 12})])
    for answer in stuck:
        assert answer.reason == "error"
        assert isinstance(answer.error, HeadstartError)
        assert str(answer.error).startswith("grammar: no token can follow")
        assert re.fullmatch("[ab]{2}", answer.text)
    assert stuck[0].tokens == stuck[1].tokens
    assert beside.tokens == answers([(None, {"max_tokens": 12})])[0].tokens


def test_a_matcher_that_breaks_ends_its_sequence_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(builtin_model(), tokenizer())
    broken, sound, cancelled = (submit(engine, REGEX) for _ in range(3))
    matcher = engine.scheduler.queue.all()[0].matcher
    assert matcher is not None

    def fails(drafts: Sequence[int]) -> list[bytes]:
        raise ValueError("no such state")

    monkeypatch.setattr(Matcher, "masks", lambda self, drafts, real=Matcher.masks: (
        fails(drafts) if self is matcher else real(self, drafts)
    ))  # fmt: skip
    cancelled.cancel()
    answer = Answer(list(broken))
    assert (answer.tokens, answer.reason) == ([], "error")
    assert "grammar: no such state" in str(answer.error)
    assert re.fullmatch(REGEX.source, Answer(list(sound)).text)
    assert Answer(list(cancelled)).reason == "cancelled"
    assert not engine.run_once()


def test_compiled_grammars_are_remembered_by_what_they_say() -> None:
    same = GrammarSpec.json_schema(json.dumps(PERSON, indent=4))
    assert same == JSON
    assert hash(same) == hash(JSON)
    assert compile_grammar(same, tokenizer()) is compile_grammar(JSON, tokenizer())
    turned = GrammarSpec.json_schema(PERSON | {"properties": dict(reversed(PERSON["properties"].items()))})  # type: ignore[attr-defined]
    assert turned != JSON  # the order of properties is the order of the answer


# Many schemas


def validated(schemas: Sequence[Schema], model: Model, **params: Any) -> dict[str, float]:
    """Answers for all schemas, 16 at a time; every completed one is valid."""
    rows = [(GrammarSpec.json_schema(schema), {"seed": seed, **params}) for seed, schema in enumerate(schemas)]
    told = answers(rows, model)
    for schema, answer in zip(schemas, told, strict=True):
        assert answer.reason in ("stop", "length"), (schema, answer.error)
        if answer.reason == "stop":
            jsonschema.validate(json.loads(answer.text), schema, cls=jsonschema.Draft202012Validator)
    return measured(told)


def measured(told: Sequence[Answer]) -> dict[str, float]:
    tokens = sum(len(answer.tokens) for answer in told)
    rounds = sum(answer.stats.rounds for answer in told if answer.stats is not None)
    complete = sum(answer.reason == "stop" for answer in told)
    return {"answers": len(told), "complete": complete, "tokens": tokens, "tokens per round": tokens / rounds}


def test_answers_to_random_schemas_are_valid() -> None:
    schemas = [random_schema(seed) for seed in range(24)]
    numbers = validated(schemas, tiny_model(), temperature=0.7, max_tokens=40, logit_bias=blanks())
    assert numbers["complete"] >= 10


@pytest.mark.slow
def test_answers_to_500_random_schemas_and_to_real_ones_are_valid(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And how many tokens a round they take, beside plain text: the table in docs/explanation/exactness.md."""
    real = [schema for _, schema in real_schemas() if can_be_used(schema)]
    assert len(real) >= 5
    random = [random_schema(seed) for seed in range(500)]
    lines = ["| what | answers | completed | tokens | tokens per round |", "| --- | --- | --- | --- | --- |"]
    for name, way, most in (("greedy", {}, 64), ("temperature 0.7", {"temperature": 0.7}, 500)):
        way = {"max_tokens": 64, **way}
        table = {
            "no grammar": measured(answers([(None, {"seed": seed, **way}) for seed in range(16)], builtin_model())),
            "random schemas": validated(random[:most], builtin_model(), **way),
            "real schemas": validated(real * 2, builtin_model(), **way),
        }
        for what, numbers in table.items():
            shown = [f"{value:.2f}" if isinstance(value, float) else f"{value}" for value in numbers.values()]
            lines.append(f"| {what}, {name} | {' | '.join(shown)} |")
    with capsys.disabled():
        print("", *lines, sep="\n")


def can_be_used(schema: Schema) -> bool:
    """A keyword that llguidance does not know is refused, never ignored."""
    try:
        compile_grammar(GrammarSpec.json_schema(schema), tokenizer())
    except RequestError:
        return False
    return True
