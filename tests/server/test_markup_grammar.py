"""Grammars that force tool calls and limit reasoning, alone and through the real engine."""

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from documents import Message
from mlx_lm.tokenizer_utils import TokenizerWrapper
from running import tokenizer

from fixtures import builtin_model, collect, random_model
from headstart.checkpoint import load_tokenizer, resolve
from headstart.engine import Engine, Request
from headstart.errors import RequestError
from headstart.models import Model
from headstart.sampling import GrammarSpec, SamplingParams, compile_grammar
from headstart.server.markup import Markup, OutputParser, Tools, call_grammar, thinking_state, with_thinking

JSON = Markup.of(load_tokenizer(resolve("tiny-qwen3.5")))
XML = replace(JSON, style="xml")
FORMATS = pytest.mark.parametrize("markup", [JSON, XML], ids=["json", "xml"])
SHORT: Tools = {  # even a model that knows nothing comes to its end
    "set_light": {
        "type": "object",
        "properties": {
            "room": {"enum": ["kitchen", "hall"]},
            "level": {"$ref": "#/$defs/Level"},
            "on": {"type": "boolean"},
        },
        "required": ["room", "level", "on"],
        "additionalProperties": False,
        "$defs": {"Level": {"type": "integer", "minimum": 0, "maximum": 99}},
    },
    "now": {"type": "object", "properties": {}},
}
LONG: Tools = {
    "write": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "lines": {"type": "array"}, "note": {"type": ["string", "null"]}},
        "required": ["path"],
    },
    "log": {},
}
ANSWER = GrammarSpec.json_schema(
    {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
)


def ids(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False))


def permits(spec: GrammarSpec | None, text: str) -> bool:
    """The whole of it, and an end behind it."""
    assert spec is not None
    matcher = compile_grammar(spec, tokenizer()).matcher(tokenizer().eos_token_ids, 8192)
    end = sorted(tokenizer().eos_token_ids)[0]
    tokens = [*ids(text), end]
    return matcher.advance(tokens) >= len(tokens) - 1 and matcher.stopped


def clueless() -> Model:
    return random_model("dense", vocab_size=8192)


SequenceState = tuple[GrammarSpec | None, dict[str, Any]]


def answers(*rows: SequenceState, model: Model | None = None) -> list[tuple[list[int], str]]:
    """Of sequences that decode together: the tokens, and the text without the one that ends it."""
    engine, ends = Engine(model or clueless(), tokenizer()), tokenizer().eos_token_ids
    prompt, common = ids("def read_config(path):\n"), {"max_tokens": 60, "k": 3}
    requests = [Request(prompt, SamplingParams(grammar=spec, **common | params)) for spec, params in rows]
    told = [collect(handle) for handle in [engine.submit(request) for request in requests]]
    assert [answer.error for answer in told] == [None] * len(rows)
    return [(answer.tokens, tokenizer().decode([t for t in answer.tokens if t not in ends])) for answer in told]


def said(spec: GrammarSpec | None, **params: Any) -> list[int]:
    return answers((spec, params))[0][0]


def message(text: str, tools: Tools = SHORT, *, thinking: bool = False) -> Message:
    parser = OutputParser(tools, thinking=thinking)
    return Message.of(parser.feed(text) + parser.finish())


# What is known of a model


def with_template(template: str | None) -> TokenizerWrapper:
    other = load_tokenizer(resolve("tiny-qwen3.5"))
    other._tokenizer.chat_template = template
    return other


def test_the_template_tells_how_calls_are_written() -> None:
    assert Markup.of(tokenizer()).style == "json"
    assert Markup.of(with_template("… '<tool_call>\\n<function=' + name + '>' …")).style == "xml"
    assert Markup.of(with_template('… <tool_call>\\n{"name": <name>, "arguments": <object>} …')).style == "json"
    assert Markup.of(with_template("<|im_start|>")).style is None
    assert Markup.of(with_template(None)).style is None


def test_the_prompt_tells_whether_a_thought_has_begun() -> None:
    messages = [{"role": "user", "content": "What is <think>?"}]
    asked = {"add_generation_prompt": True}
    assert (
        thinking_state(tokenizer().apply_chat_template(messages, **asked, enable_thinking=None), tokenizer())
        == "finished"
    )
    open_prompt = tokenizer().apply_chat_template(messages, **asked, enable_thinking=True)
    assert thinking_state(open_prompt, tokenizer()) == "undecided"
    assert thinking_state([*open_prompt, *ids("<think>\n")], tokenizer()) == "started"


# Calls that must come


XML_CALLS = [
    "<tool_call>\n<function=write>\n<parameter=path>\na b\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n<function=write>\n<parameter=path>\n</b>\n\n</parameter>\n"
    '<parameter=lines>\n[1, "x"]\n</parameter>\n'
    "<parameter=note>\nnull\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n<function=log>\n<parameter=anything>\nat all\n</parameter>\n</function>\n</tool_call>",
]  # fmt: skip
JSON_CALLS = [
    '<tool_call>\n{"name": "write", "arguments": {"path": "a b"}}\n</tool_call>',
    '<tool_call>\n{"name": "write", "arguments": {"path": "<", "lines": [1, "x"], "note": null}}\n</tool_call>',
    '<tool_call>\n{"name": "log", "arguments": {"anything": "at all"}}\n</tool_call>',
]
NEITHER = [
    "I will.", "", "<tool_call>\n</tool_call>", "<tool_call>\n<function=read>\n</function>\n</tool_call>",
    "<tool_call>\n<function=write>\n</function>\n</tool_call>",
    "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n<parameter=lines>\nfive\n</parameter>\n</function>\n</tool_call>",
    '<tool_call>\n{"name": "write", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "write", "arguments": {"path": "a", "other": 1}}\n</tool_call>',
    '<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>',
]  # fmt: skip


@pytest.mark.parametrize(
    ("markup", "calls", "others"), [(JSON, JSON_CALLS, XML_CALLS), (XML, XML_CALLS, JSON_CALLS)], ids=["json", "xml"]
)
def test_the_grammar_permits_calls_and_nothing_else(markup: Markup, calls: list[str], others: list[str]) -> None:
    grammar = call_grammar(LONG, markup)
    for call in calls:
        assert permits(grammar, call), call
        assert len(message(call, LONG).calls) == 1
    for text in (*others, *NEITHER, calls[0] + " and so on", calls[0][:-13]):
        assert not permits(grammar, text), text
    assert permits(grammar, "\n".join(calls))
    assert not permits(call_grammar(LONG, markup, parallel=False), "\n".join(calls))
    assert not permits(call_grammar({"log": {}}, markup), calls[0])


@pytest.mark.slow
def test_a_model_that_knows_no_tools_must_call_one() -> None:
    tool: Tools = {"set_light": SHORT["set_light"]}
    grammars = [call_grammar(tool, markup, parallel=False) for markup in (JSON, XML)]
    greedy = answers(*[(grammar, {}) for grammar in grammars], model=builtin_model())
    drawn = answers(*[(grammar, {"temperature": 1.0, "seed": seed}) for grammar in grammars for seed in range(4)])
    for _, text in (*greedy, *drawn):
        read = message(text)
        assert (read.content, [call.name for call in read.calls]) == ("", ["set_light"])
        jsonschema.validate(json.loads(read.calls[0].arguments), tool["set_light"])


@FORMATS
def test_a_forced_call_is_the_same_with_and_without_drafts(markup: Markup) -> None:
    grammar = call_grammar(SHORT, markup, parallel=False)
    for params in ({}, {"temperature": 1.0, "seed": 5}):
        assert said(grammar, **params) == said(grammar, **params, k=0)


@FORMATS
def test_any_of_the_tools_may_be_called(markup: Markup) -> None:
    grammar = call_grammar(SHORT, markup, parallel=False)
    liked = [dict.fromkeys(ids(f'<function={name}> "{name}"'), 50.0) for name in SHORT]
    told = answers(*[(grammar, {"logit_bias": bias}) for bias in liked])
    assert [message(text).calls[0].name for _, text in told] == list(SHORT)


@FORMATS
def test_a_tool_with_a_schema_that_is_none_is_refused(markup: Markup) -> None:
    grammar = call_grammar({"f": {"properties": {"a": {"type": "integer", "minimum": "x"}}}}, markup)
    with pytest.raises(RequestError, match="grammar"):
        compile_grammar(grammar, tokenizer())


def test_marks_that_are_no_tokens_are_written_out() -> None:
    grammar = call_grammar(SHORT, replace(JSON, ids={}))
    assert '"<tool_call>"' in grammar.source


CHOOSY: Tools = {
    "paint": {
        "type": "object",
        "properties": {
            "listed": {"enum": ["red", "blue"]},
            "counted": {"type": "integer", "minimum": 3, "maximum": 9},
            "by reference": {"$ref": "#/$defs/Flag"},
            "free": {"anyOf": [{"enum": ["a"]}, {"type": "string"}]},
        },
        "$defs": {"Flag": {"type": "boolean"}},
    }
}
CHOICES = [
    ("listed", ["red", "blue"], ["green", "", "null", '"red"']),
    ("counted", ["3", "9"], ["none", "2", "10"]),
    ("by reference", ["true"], ["yes", "1"]),
    ("free", ["a", "anything\nat all"], []),
]


@pytest.mark.parametrize(("key", "good", "bad"), CHOICES)
def test_values_are_those_that_the_schema_permits(key: str, good: list[str], bad: list[str]) -> None:
    """Bare text has no quotes that %json could be left to deal with."""
    grammar = call_grammar(CHOOSY, XML)
    written = "<tool_call>\n<function=paint>\n<parameter={}>\n{}\n</parameter>\n</function>\n</tool_call>"
    for value in good:
        assert permits(grammar, written.format(key, value)), value
    for value in bad:
        assert not permits(grammar, written.format(key, value)), value


@FORMATS
def test_a_schema_with_any_number_of_ways_through_it_makes_a_grammar(markup: Markup) -> None:
    ways = {f"D{i}": {"anyOf": [{"$ref": f"#/$defs/D{i + 1}"}] * 2} for i in range(30)}
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/D0"}},
        "required": ["a"],
        "$defs": {**ways, "D30": {"enum": ["x", "y"]}},
    }
    grammar = call_grammar({"f": schema}, markup)
    xml = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
    as_json = '<tool_call>\n{{"name": "f", "arguments": {{"a": "{}"}}}}\n</tool_call>'
    written = xml if markup is XML else as_json
    assert permits(grammar, written.format("x"))
    assert not permits(grammar, written.format("z"))


# Thoughts before


def test_an_answer_may_be_thought_about_before_it_follows_its_grammar() -> None:
    begun = with_thinking(ANSWER, JSON, "started")
    assert permits(begun, 'Hm, <tool_call> or {"n": 3}?\n</think>\n\n{"n": 1}')
    assert not permits(begun, '{"n": 1}')
    assert not permits(begun, 'Hm.\n</think>\n\n{"n": 3}')
    assert not permits(begun, "Hm.")
    open_ = with_thinking(ANSWER, JSON, "undecided")
    assert permits(open_, '{"n": 1}')
    assert permits(open_, '<think>\nHm.\n</think>\n\n{"n": 1}')
    assert not permits(open_, 'Hm.\n</think>\n\n{"n": 1}')
    assert with_thinking(ANSWER, JSON, "finished") == ANSWER
    assert with_thinking(ANSWER, replace(JSON, ids={}), "started") == ANSWER


def test_a_call_that_must_come_does_not_come_in_the_thought() -> None:
    call = call_grammar(LONG, JSON)
    for budget in (None, 200):
        for thought, opening in (("started", ""), ("undecided", "<think>\n")):
            grammar = with_thinking(call, JSON, thought, budget=budget, calls=False)
            assert permits(grammar, f"{opening}Hm.\n</think>\n\n{JSON_CALLS[0]}")
            assert not permits(grammar, f"{opening}Hm.\n{JSON_CALLS[0]}\n</think>\n\n{JSON_CALLS[0]}")


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (GrammarSpec("json_object"), '{"a": [1]}', "[1]"),
        (GrammarSpec.json_schema(True), "[1]", "x"),
        (GrammarSpec("regex", r"a/b\/[/x]\\\n"), "a/b//\\\n", "a/b/y\\\n"),
        (GrammarSpec("regex", "one\ntwo"), "one\ntwo", "one two"),
        (GrammarSpec("lark", 'start: "{" x "}"\nx: /[a-z]+/ // with a }'), "{ab}", "{1}"),
        (call_grammar(LONG, JSON), JSON_CALLS[1], XML_CALLS[1]),
        (call_grammar(LONG, XML), XML_CALLS[1], JSON_CALLS[1]),
    ],
)
def test_every_kind_of_grammar_can_be_thought_about_first(spec: GrammarSpec, good: str, bad: str) -> None:
    first = with_thinking(spec, JSON, "started")
    assert permits(spec, good)
    assert permits(first, f"Hm.\n</think>\n\n{good}")
    assert not permits(first, f"Hm.\n</think>\n\n{bad}")


def test_a_thought_ends_when_its_budget_is_spent() -> None:
    end = JSON.ids["</think>"]
    free = said(None, max_tokens=20)
    assert end not in free  # it would think on
    for budget in (0, 1, 6):
        grammar = with_thinking(None, JSON, "started", budget=budget)
        tokens = said(grammar, max_tokens=20)
        assert tokens[: budget + 1] == [*free[:budget], end]
        assert len(tokens) > budget + 5  # and goes on to answer
        assert said(grammar, max_tokens=20, k=0) == tokens
    seeded = {"max_tokens": 20, "temperature": 0.9, "seed": 3}
    grammar = with_thinking(None, JSON, "started", budget=6)
    assert said(grammar, **seeded) == said(grammar, **seeded, k=0)


def test_a_budget_that_is_not_spent_changes_nothing() -> None:
    for thought in ("started", "undecided"):
        grammar = with_thinking(None, JSON, thought, budget=500)
        assert said(grammar, max_tokens=30) == said(None, max_tokens=30)


def test_the_budget_counts_from_where_the_model_begins_to_think() -> None:
    begin, end = JSON.ids["<think>"], JSON.ids["</think>"]
    eager = {begin: 50.0}
    tokens = said(with_thinking(None, JSON, "undecided", budget=4), logit_bias=eager, max_tokens=12)
    assert tokens[:6] == [begin] * 5 + [end]


def test_a_budget_leaves_calls_and_ends_as_they_are() -> None:
    begun, open_ = (with_thinking(None, JSON, thought, budget=50) for thought in ("started", "undecided"))
    for text in ("Hm.\n</think>\n\nFour.", f"Hm.\n</think>\n\n{JSON_CALLS[0]}", f"Hm. {JSON_CALLS[0]}"):
        assert permits(begun, text)
        assert permits(open_, f"<think>{text}")
    assert permits(open_, "Four.")
    spent = with_thinking(None, JSON, "started", budget=len(ids("Hm.")))
    assert permits(spent, "Hm.</think>")
    assert not permits(spent, "Hm.")  # it ends in the answer now


def test_reasoning_with_a_budget_is_followed_by_the_grammar() -> None:
    for spec in (ANSWER, call_grammar({"now": SHORT["now"]}, XML, parallel=False)):
        grammar = with_thinking(spec, JSON, "started", budget=5)
        ((tokens, text),) = answers((grammar, {"temperature": 1.0, "seed": 1}))
        assert tokens.index(JSON.ids["</think>"]) <= 5
        read = message(text, thinking=True)
        assert read.reasoning
        if spec is ANSWER:
            assert json.loads(read.content) in ({"n": 1}, {"n": 2})
        else:
            assert [call.name for call in read.calls] == ["now"]
        assert said(grammar, temperature=1.0, seed=1, k=0) == tokens
