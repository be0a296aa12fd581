"""Reasoning and tool calls as Gemma 4 writes them: read like mlx-lm reads them, and forced by grammars."""

import json
from functools import lru_cache
from typing import Any

import pytest
from documents import Message
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import gemma4

from headstart.checkpoint import load_tokenizer, resolve
from headstart.sampling import GrammarSpec, compile_grammar
from headstart.server.markup import Delta, Markup, OutputParser, Tools, call_grammar, thinking_state, with_thinking
from headstart.server.markup.gemma import CHANNEL, CHANNEL_END, GEMMA_CALL, GEMMA_CALL_END, QUOTE

TOOLS: Tools = {
    "write": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "mode": {"enum": ["a", "w"]},
            "lines": {"type": "array"},
            "level": {"type": "integer", "minimum": 0, "maximum": 99},
            "note": {"type": ["string", "null"]},
        },
        "required": ["mode"],
    },
    "now": {"type": "object", "properties": {}},
}
THOUGHT = "<|channel>thought\nHm.\n\nYes.\n<channel|>"


def call(name: str, inside: str) -> str:
    return f"<|tool_call>call:{name}{{{inside}}}<tool_call|>"


def text(value: str) -> str:
    return f"{QUOTE}{value}{QUOTE}"


def read(*pieces: str, tools: Tools = TOOLS) -> list[Delta]:
    parser = OutputParser(tools)
    return [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()


def message(output: str, **how: Any) -> Message:
    return Message.of(read(output, **how))


@lru_cache
def tokenizer(*, tokens: bool = True) -> TokenizerWrapper:
    """Of a Gemma 4's template: the markers are `tokens`, as in releases, or text."""
    found: Any = load_tokenizer(resolve("tiny-qwen3.5"))
    found._tokenizer.chat_template = f"… {GEMMA_CALL}call:… {GEMMA_CALL_END} …"
    if tokens:
        markers = [CHANNEL, CHANNEL_END, GEMMA_CALL, GEMMA_CALL_END, QUOTE]
        found._tokenizer.add_tokens(markers, special_tokens=True)
    return TokenizerWrapper(found._tokenizer, eos_token_ids=found.eos_token_ids)


GIVEN: list[dict[str, Any]] = [
    {},
    {"mode": "a"},
    {"path": 'a "b"\n{,x:1}', "mode": "w", "level": 7, "note": None},
    {"mode": "a", "lines": [1, "x, y", {"deep": [True, "é:"]}, []], "path": ""},
]


def written(value: Any) -> str:
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{written(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


@pytest.mark.parametrize("given", GIVEN)
def test_a_call_is_read_as_mlx_lm_reads_it_however_it_is_split(given: Any) -> None:
    output = call("write", written(given)[1:-1])
    (found,) = message(output).calls
    assert found.name == "write"
    assert json.loads(found.arguments) == given
    assert gemma4.parse_tool_call(output) == {"name": "write", "arguments": given}
    assert Message.of(read(*output)) == message(output)


def test_reasoning_calls_and_text_are_told_apart() -> None:
    output = THOUGHT + "\nI write.\n" + call("now", "") + call("write", f"mode:{text('a')}")
    found = message(output)
    assert (found.reasoning, found.content) == ("Hm.\n\nYes.", "I write.")
    assert [(each.name, each.arguments) for each in found.calls] == [("now", "{}"), ("write", '{"mode": "a"}')]
    assert Message.of(read(*output)) == found


def test_a_marker_inside_an_argument_does_not_end_the_call() -> None:
    (found,) = message(call("write", f"path:{text(GEMMA_CALL_END)},mode:{text('a')}")).calls
    assert json.loads(found.arguments) == {"path": GEMMA_CALL_END, "mode": "a"}


@pytest.mark.parametrize(
    "output", [call("read", ""), "<|tool_call>now()<tool_call|>", "<|tool_call>", "<channel|> a"]
)
def test_what_only_looks_like_markup_is_content(output: str) -> None:
    assert message(output) == Message(output, "", ())
    assert message(call("now", ""), tools={}).calls == ()


@pytest.mark.parametrize("inside", ["mode:{", "mode:<", "mode a"])
def test_broken_arguments_are_what_was_written_and_what_follows_is_read(inside: str) -> None:
    found = message(call("write", inside) + "And?" + call("now", ""))
    assert [each.name for each in found.calls] == ["write", "now"]
    assert found.calls[0].arguments == f"{{{inside}}}"
    parser = OutputParser(TOOLS)
    parser.feed(call("write", f"mode:{text('a')}")[:-12])
    parser.finish()
    assert parser.broken


def permits(grammar: GrammarSpec | None, output: str, known: TokenizerWrapper) -> bool:
    assert grammar is not None
    matcher = compile_grammar(grammar, known).matcher(known.eos_token_ids, 8192 + 16)
    tokens = [*known.encode(output, add_special_tokens=False), min(known.eos_token_ids)]
    return matcher.advance(tokens) >= len(tokens) - 1 and matcher.stopped


GOOD = [
    call("now", ""),
    *(call("write", written(given)[1:-1]) for given in ({"mode": "a"}, {"path": 'a, "b"', "mode": "w", "level": 7})),
    call("write", written({"mode": "w", "lines": [1, "x", {"a": [None]}], "note": None})[1:-1]),
    call("write", written({"mode": "w", "note": "n"})[1:-1]),
]
BAD = [
    "I will.",
    "",
    call("read", ""),
    *(call("write", inside) for inside in ("", "path:a", f"mode:{text('x')}", f"mode:{text('a')},level:100")),
    call("write", f"level:1,mode:{text('a')}"),  # in another order
    GOOD[0] + " and so on",
    GOOD[1][:-12],
]


@pytest.mark.parametrize("tokens", [True, False])
def test_the_grammar_permits_calls_and_nothing_else(tokens: bool) -> None:
    known = tokenizer(tokens=tokens)
    markup = Markup.of(known)
    assert (markup.style, markup.thinks) == ("gemma", tokens)
    grammar, one = call_grammar(TOOLS, markup), call_grammar(TOOLS, markup, parallel=False)
    for output in GOOD:
        assert permits(grammar, output, known), output
        assert len(message(output).calls) == 1
    for output in BAD:
        assert not permits(grammar, output, known), output
    assert permits(grammar, "".join(GOOD), known)
    assert not permits(one, "".join(GOOD), known)
    optional: Tools = {"f": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}}}
    for inside, fits in (("", True), ("a:1", True), ("b:true", True), ("a:1,b:false", True), ("b:true,a:1", False)):
        assert permits(call_grammar(optional, markup), call("f", inside), known) == fits, inside


def test_a_call_and_an_answer_may_follow_a_thought_of_limited_length() -> None:
    known = tokenizer()
    markup = Markup.of(known)
    calls = with_thinking(call_grammar(TOOLS, markup), markup, "undecided")
    assert permits(calls, THOUGHT + GOOD[1], known)
    assert permits(calls, GOOD[1], known)
    assert not permits(calls, THOUGHT + "And.", known)
    for budget, fits in ((40, True), (3, False)):
        assert permits(with_thinking(None, markup, "undecided", budget=budget), THOUGHT + "And.", known) == fits
    assert permits(with_thinking(GrammarSpec("regex", "a+"), markup, "undecided"), THOUGHT + "aa", known)


def test_the_prompt_tells_that_there_is_no_thought() -> None:
    for end, state in ((f"{CHANNEL}thought\n{CHANNEL_END}", "finished"), ("<|turn>model\n", "undecided")):
        assert thinking_state(tokenizer().encode(f"Hi.{end}"), tokenizer()) == state
