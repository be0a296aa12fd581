"""Grammars that llguidance cannot take back tokens of, and limits of its own that are met while decoding."""

import json
import re
from typing import Any

import pytest
from test_grammar import answers, ids, matcher_of, tokenizer

from headstart.errors import GrammarLimit, RequestError
from headstart.sampling import GrammarSpec, Matcher, compile_grammar, find_grammar
from headstart.sampling.grammar import LIMITS

LIMITED = [
    'start: text number\ntext[max_tokens=5]: /[a-z ]*/\nnumber: "! " /[0-9]{1,4}/',
    'start: "in a long literal prefix, " text "! and then some more " text\ntext[max_tokens=4]: /[a-z ]*/',
    'start: sentence number\nsentence[stop="."]: /[a-z .]*/\nnumber: /[0-9]{1,4}/',
    'start: "in a text " <[70]> " and " <[70]> /[a-z ]{9,20}/',  # an ordinary token by its id
    'start: word+ "."\nword[stop=/[ ,]/, max_tokens=3]: /[a-z ,]{1,30}/',
]
WIDE = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(700)}}
# What follows `wide: {` is too much for a row of llguidance's parser.
EITHER = GrammarSpec("lark", f'start: "wide: " wide | "slim: " /[0-9]{{3}}/\nwide: %json {json.dumps(WIDE)}')


@pytest.mark.parametrize("source", LIMITED)
@pytest.mark.parametrize("way", [{}, {"temperature": 1.2, "seed": 5}], ids=["greedy", "seeded"])
def test_a_grammar_that_cannot_be_taken_back_is_followed_alike_for_every_k(source: str, way: dict[str, Any]) -> None:
    spec = GrammarSpec("lark", source)
    together = answers([(spec, {"k": k, "max_tokens": 24, **way}) for k in (0, 1, 4, "auto")] + [(None, {})])[:4]
    (alone,) = answers([(spec, {"k": 3, "max_tokens": 24, **way})])
    assert alone.error is None
    assert [(answer.tokens, answer.reason) for answer in together] == [(alone.tokens, alone.reason)] * 4
    assert alone.stats is not None
    assert alone.stats.proposed_draft_tokens > 0


def test_its_limit_is_kept() -> None:
    (answer,) = answers([(GrammarSpec("lark", LIMITED[0]), {"k": 3, "max_tokens": 24, "temperature": 1.0})])
    assert answer.reason == "stop"
    written, number = answer.text.split("! ")
    assert re.fullmatch("[0-9]{1,4}", number)
    assert len(answer.tokens) <= 5 + len(ids("! ")) + len(number) + 1
    assert re.fullmatch("[a-z ]*", written)


def test_a_schema_that_is_too_wide_is_refused_at_once() -> None:
    with pytest.raises(RequestError, match=r"^grammar .*Current row has 28.. items; max is 2000"):
        compile_grammar(GrammarSpec.json_schema(WIDE), tokenizer())


@pytest.mark.parametrize("k", [0, 5])
def test_a_limit_ends_the_request_that_meets_it_and_no_other(k: int) -> None:
    """What drafts meet is not what the answer meets."""
    ways = [{"logit_bias": {ids(word)[0]: 50.0}} for word in ("wide", "slim")]
    rows = [(EITHER, {"k": k, "max_tokens": 16, **way}) for way in ways]
    met, free = answers([*rows, (None, {"k": k, "max_tokens": 12})])[:2]
    assert (met.text, met.reason) == ("w", "error")
    assert isinstance(met.error, GrammarLimit)
    assert "Current row has 28" in str(met.error)
    assert (free.reason, free.text[:6]) == ("stop", "slim: ")


def test_drafts_that_meet_a_limit_do_no_harm() -> None:
    matcher, fresh = matcher_of(EITHER), matcher_of(EITHER)
    assert len(matcher.masks(ids('wide: {"p1": 2}'))) == 2
    for token in ids("slim: 12"):
        assert matcher.masks([]) == fresh.masks([])
        assert matcher.advance([token]) == fresh.advance([token]) == 1
    assert (matcher.failed, fresh.failed) == (None, None)


def test_generated_drafts_up_to_a_limit_are_part_of_the_answer() -> None:
    """As without drafts."""
    drafts = ids('wide: {"p1": 2}')
    matcher, plain = matcher_of(EITHER), matcher_of(EITHER)
    matcher.masks(drafts)
    count = matcher.advance(drafts)
    alone = 0
    while plain.failed is None:
        plain.masks([])
        alone += plain.advance([drafts[alone]])
    assert count == alone == 1
    assert isinstance(matcher.failed, GrammarLimit)
    assert str(matcher.failed) == str(plain.failed)


@pytest.fixture
def few_states(monkeypatch: pytest.MonkeyPatch) -> GrammarSpec:
    """A grammar whose lexer is full after some words, and which no other test has compiled."""
    monkeypatch.setitem(LIMITS, "max_lexer_states", 300)
    return GrammarSpec("regex", "([a-z]{3,40} ){2,29}few")


def follow(matcher: Matcher, text: str) -> int:
    """How many tokens can be followed, a step each."""
    for index, token in enumerate(ids(text)):
        try:
            matcher.masks([])
        except GrammarLimit as error:
            matcher.failed = error
        if matcher.failed is not None or not matcher.advance([token]):
            return index
    return len(ids(text))


def test_a_lexer_that_is_full_is_replaced_for_all_that_share_it(few_states: GrammarSpec) -> None:
    first, second = matcher_of(few_states), matcher_of(few_states)
    text = "every sequence has words and words have letters " * 3
    count = follow(second, "some other words ")
    assert count == len(ids("some other words "))
    assert follow(first, text) == len(ids(text))
    assert find_grammar(few_states, tokenizer()) is None, "the next request compiles it again"
    assert second.advance(ids("more words ")) == len(ids("more words "))
    assert (first.failed, second.failed) == (None, None)
    assert follow(matcher_of(few_states), text) == len(ids(text))


def test_what_a_new_lexer_cannot_hold_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = GrammarSpec("regex", "([a-z]{3,40} ){2,28}fuel")
    with monkeypatch.context() as patch:
        patch.setitem(LIMITS, "step_lexer_fuel", 600)
        first, second = matcher_of(spec), matcher_of(spec)
        assert second.advance(ids("some words ")) == len(ids("some words "))
        follow(first, "every sequence has words ")
        assert isinstance(first.failed, GrammarLimit)
        assert "too many expressions" in str(first.failed)
    assert second.advance(ids("and more ")) == len(ids("and more ")), "with the usual fuel"
