"""Parsing reasoning and tool calls in the output of a model."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from documents import Call, Message
from mlx_lm.tool_parsers import json_tools, qwen3_coder

from headstart.server.markup import Delta, OutputParser, Tools

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "wind": {"type": "number"},
        "indoors": {"type": "boolean"},
        "at": {"type": "object"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "note": {"type": ["string", "null"]},
        "scale": {"$ref": "#/$defs/Scale"},
        "either": {"oneOf": [{"type": "string"}, {"type": "number"}]},
        "bare": {},
    },
    "$defs": {"Scale": {"enum": ["C", "F"]}},
}
TOOLS: Tools = {"get_weather": WEATHER, "get": {"type": "object", "properties": {}}}

LINES = '\n  two\n\tlines "quoted" \\ </b> < </para <tool_call>\n'


def read(*pieces: str, tools: Tools = TOOLS, **how: bool) -> list[Delta]:
    parser = OutputParser(tools, **how)
    return [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()


def message(text: str, **how: Any) -> Message:
    return Message.of(read(text, **how))


def xml(name: str, **parameters: str) -> str:
    lines = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(lines)}</function>\n</tool_call>"


def arguments(text: str) -> Any:
    (call,) = message(text).calls
    return json.loads(call.arguments)


# Thoughts


def test_reasoning_is_separated_from_content() -> None:
    assert message("<think>\nHm.\n\nYes.\n</think>\n\nFour.\n") == Message("Four.\n", "Hm.\n\nYes.", ())


def test_an_answer_begins_inside_the_thought_that_the_prompt_has_opened() -> None:
    assert message("Hm.\n</think>\n\nFour.", thinking=True) == Message("Four.", "Hm.", ())


def test_a_thought_that_is_cut_off_is_still_a_thought() -> None:
    assert message("<think>\nI should </thi") == Message("", "I should </thi", ())


def test_a_thought_can_only_begin_an_answer() -> None:
    text = "Models write <think> and </think> around thoughts."
    assert message(text) == Message(text, "", ())
    assert message(f"<think></think>{text}") == Message(text, "", ())


def test_the_reader_knows_while_a_thought_lasts() -> None:
    parser = OutputParser()
    seen = []
    for piece in ("<think>", "a", "</think>", "b"):
        parser.feed(piece)
        seen.append(parser.thinking)
    assert seen == [True, True, False, False]


# Calls


def test_values_are_typed_by_the_schema() -> None:
    given = {
        "city": "Zürich",
        "days": "3",
        "wind": "2.5",
        "indoors": "True",
        "at": '{"lat": 47.4, "tags": ["a"]}',
        "tags": "['x', 'y']",
        "limit": "12345678901234567890",
        "note": "null",
        "scale": "C",
        "either": "7",
        "bare": "[1]",
    }
    assert arguments(xml("get_weather", **given)) == {
        "city": "Zürich",
        "days": 3,
        "wind": 2.5,
        "indoors": True,
        "at": {"lat": 47.4, "tags": ["a"]},
        "tags": ["x", "y"],
        "limit": 12345678901234567890,
        "note": None,
        "scale": "C",
        "either": 7,
        "bare": [1],
    }


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("city", "null", "null"),  # a text that may be searched for
        ("city", "5", "5"),
        ("city", "", ""),
        ("city", LINES, LINES),
        ("days", "5.0", 5),
        ("days", "-1", -1),
        ("wind", "1e3", 1000),
        ("indoors", "false", False),
        ("limit", "None", None),
        ("note", "5", "5"),
        ("either", "seven", "seven"),
        ("either", '"seven"', '"seven"'),  # quotes and all
        ("bare", "5", "5"),
        ("unheard_of", "5", "5"),
        ("days", "three", "three"),  # against the schema: the tool may say so
        ("days", "NaN", "NaN"),
        ("wind", "1e999", "1e999"),
        ("at", "{'a': {1, 2}}", "{'a': {1, 2}}"),
        ("at", "[" * 100_000, "[" * 100_000),
        ("tags", "[" * 200 + "]" * 200, "[" * 200 + "]" * 200),  # more than everyone can read
        ("indoors", "yes", "yes"),
    ],
)  # fmt: skip
def test_a_value_has_the_type_of_its_schema_or_is_text(key: str, text: str, value: Any) -> None:
    assert arguments(xml("get_weather", **{key: text})) == {key: value}
    assert type(arguments(xml("get_weather", **{key: text}))[key]) is type(value)


def test_parameters_of_other_schemas_follow_additional_properties() -> None:
    tools = {"put": {"type": "object", "additionalProperties": {"type": "integer"}}}
    assert json.loads(message(xml("put", a="1"), tools=tools).calls[0].arguments) == {"a": 1}


def test_a_schema_that_refers_to_itself_does_no_harm() -> None:
    tree = {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "array"}]}
    tools = {"grow": {"type": "object", "properties": {"t": {"$ref": "#/$defs/Tree"}}, "$defs": {"Tree": tree}}}
    assert json.loads(message(xml("grow", t="[1]"), tools=tools).calls[0].arguments) == {"t": [1]}


def test_types_are_found_however_many_ways_lead_to_them() -> None:
    """Thirty definitions that are each either of the next and the next, and a chain too long to be followed."""
    ends = {"D30": {"type": "integer"}, "Deep199": {"type": "integer"}}
    diamond = {f"D{i}": {"anyOf": [{"$ref": f"#/$defs/D{i + 1}"}] * 2} for i in range(30)}
    chain = {f"Deep{i}": {"$ref": f"#/$defs/Deep{i + 1}"} for i in range(199)}
    properties = {"a": {"$ref": "#/$defs/D0"}, "b": {"$ref": "#/$defs/Deep0"}}
    tools = {"f": {"type": "object", "properties": properties, "$defs": {**diamond, **chain, **ends}}}
    (call,) = message(xml("f", a="1", b="1"), tools=tools).calls
    assert json.loads(call.arguments) == {"a": 1, "b": "1"}


@pytest.mark.parametrize("key", ["first name", "name ", "\t", 'a "b"', "é", "$ref", "a=b"])
def test_a_parameter_may_have_any_name_on_one_line(key: str) -> None:
    tools = {"f": {"type": "object", "properties": {"a": {}, key: {"type": "integer"}, "first": {}}}}
    text = xml("f", **{"a": "x", key: "5", "first": "y"})
    (call,) = message(text, tools=tools).calls
    assert json.loads(call.arguments) == {"a": "x", key: 5, "first": "y"}
    assert Message.of(read(*text, tools=tools)).calls == (call,)


def test_half_a_character_is_emitted_as_such() -> None:
    """JSON can hold one half of a pair, and UTF-8 cannot: what is passed on must be possible to send."""
    at_its_end = '<tool_call>{"arguments": {"city": "a\\ud83d"}, "name": "get_weather"}</tool_call>'
    for text in (
        at_its_end,
        xml("get_weather", at='{"city": "a\\ud83d"}'),
        xml("get_weather", at="{'city': 'a\\ud83d'}"),
    ):
        (call,) = message(text).calls
        assert "a\ufffd" in call.arguments.encode().decode()
    whole = xml("get_weather", at='{"city": "\\ud83d\\ude42"}')
    assert arguments(whole) == {"at": {"city": "🙂"}}


def test_json_calls_are_passed_on_as_written() -> None:
    text = '{"city":"}\\"</tool_call>", "at" : {"lat": [1, 2.50]}}'
    written = f'<tool_call>\n{{"name": "get_weather", "arguments": {text}}}\n</tool_call>'
    assert message(written) == Message("", "", (Call("get_weather", text),))


@pytest.mark.parametrize(
    "call",
    [
        '{"arguments": {"days": 1}, "name": "get_weather"}',
        '{"name": "get_weather", "id": 7, "arguments": {"days": 1}}',
        '{ "name" : "get_weather" , "arguments" : {"days": 1} }',
        '{"name": "get_weather", "arguments": {"days": 1}',  # forgets its last bracket
    ],
)
def test_json_calls_may_be_written_in_other_ways(call: str) -> None:
    (read_call,) = message(f"<tool_call>{call}</tool_call>").calls
    assert (read_call.name, json.loads(read_call.arguments)) == ("get_weather", {"days": 1})
    assert message(f"<tool_call>{call}</tool_call>").content == ""


def test_a_json_call_without_arguments_has_none() -> None:
    assert message('<tool_call>{"name": "get"}</tool_call>').calls == (Call("get", "{}"),)


def test_several_calls_come_in_their_order_with_the_content_before_them() -> None:
    text = (
        "I look.\n\n"
        + xml("get")
        + "\n"
        + xml("get_weather", days="1")
        + '\n<tool_call>{"name": "get", "arguments": {}}</tool_call>\n'
    )
    deltas = read(text)
    assert deltas == [
        Delta("content", "I look."),
        Delta("tool_call", "get", 0),
        Delta("arguments", "{}", 0),
        Delta("tool_call", "get_weather", 1),
        Delta("arguments", '{"days": 1}', 1),
        Delta("tool_call", "get", 2),
        Delta("arguments", "{}", 2),
    ]  # fmt: skip


def test_text_goes_on_behind_a_call() -> None:
    assert message("One.\n\n" + xml("get") + "\nTwo.") == Message("One.\n\nTwo.", "", (Call("get", "{}"),))


def test_a_call_inside_a_thought_is_a_call() -> None:
    text = "Let me see.\n" + xml("get") + "\nDone.\n</think>\n\nGood."
    assert message(text, thinking=True) == Message("Good.", "Let me see.\nDone.", (Call("get", "{}"),))


def test_a_call_inside_a_thought_is_none_where_calls_come_later() -> None:
    thought = f"Let me see.\n{xml('get')} or {xml('get_weather')[12:]}"
    text = f"{thought}\n</think>\n\n{xml('get')}"
    expected = Message("", thought, (Call("get", "{}"),))
    assert message(text, thinking=True, calls_in_thoughts=False) == expected
    assert message(f"<think>\n{text}", calls_in_thoughts=False) == expected


def test_a_call_after_a_thought_is_a_call() -> None:
    assert message("<think>\nHm.\n</think>\n\n" + xml("get")) == Message("", "Hm.", (Call("get", "{}"),))


def test_a_call_may_lack_the_marks_around_it() -> None:
    bare = "<function=get_weather>\n<parameter=days>\n1\n</parameter>\n</function>"
    call = Call("get_weather", '{"days": 1}')
    for text in (bare, bare + "\n</tool_call>", "<tool_call>" + bare, f"<tool_call>\n{bare}\n\n</tool_call>"):
        assert message(text) == Message("", "", (call,))
    assert message(f"<tool_call>{bare}\n{bare}</tool_call>").calls == (call, call)


@pytest.mark.parametrize("write", ["xml", "json"])
def test_mlx_lm_reads_the_same_from_a_whole_call(write: str) -> None:
    given = {"city": 'a "b"\n\n\\ c', "days": 3, "wind": 1.5, "at": {"x": [None, "é"]}, "tags": [], "indoors": False}
    if write == "xml":
        text = xml("get_weather", **{k: v if isinstance(v, str) else json.dumps(v) for k, v in given.items()})
        parse = qwen3_coder.parse_tool_call
    else:
        text = f"<tool_call>{json.dumps({'name': 'get_weather', 'arguments': given})}</tool_call>"
        parse = json_tools.parse_tool_call
    inside = text.removeprefix("<tool_call>").removesuffix("</tool_call>").strip()
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}]
    (call,) = message(text).calls
    assert {"name": call.name, "arguments": json.loads(call.arguments)} == parse(inside, tools)


# What only looks like markup


@pytest.mark.parametrize(
    "text",
    [
        "if a <b and c<\n<d>: x << 3 </",
        "a <tool and <tool_ and < tool_call> and <tool_call",
        "The tag is <tool_call>, and then the function.",
        "<tool_call>",
        "<tool_call>\n</tool_call>\n",
        "<tool_call>\n{}\n</tool_call>",
        "<tool_call>[1]</tool_call>",
        "<tool_call>\n<function=forget>\n<parameter=days>\n1\n</parameter>\n</function>\n</tool_call> \n ok",
        '<tool_call>\n{"name": "forget", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "get_w", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"arguments": {}, "name": "forget"}\n</tool_call>',
        '<tool_call>\n{"arguments": 5, "name": "get"}\n</tool_call>',
        '<tool_call>\n{"name": ["get"], "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "get", "arguments": "x"}\n</tool_call>',
        '<tool_call>\n{"arguments": {"a": 1e999}, "name": "get"}\n</tool_call>',
        '<tool_call>\n{"arguments": {"a": ' + "[" * 200 + "]" * 200 + '}, "name": "get"}\n</tool_call>',
        '<tool_call>\n{"name": "get", "argu',
        "<tool_call>\n<function=get",
        "<tool_call>\n<function=get>\n",
        "<tool_call>\n<function=get>\nnow\n</function>\n</tool_call>",
        "<think",
        " \n\n ",
        "",
    ],
)  # fmt: skip
def test_what_only_looks_like_markup_is_content(text: str) -> None:
    assert message(text) == Message(text, "", ())
    assert message(f"<think>{text}", thinking=False).reasoning == text.lstrip()


CALL_IN_JSON = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
BROKEN = {
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich, and then": '{"city": "Zürich, and then',
    "<tool_call>\n<function=get_weather>\n<parameter=days>\n3": '{"days": ',
    "<tool_call>\n<function=get_weather>\n<parameter=days>\n3\n</parameter>\nand then\n</function>\n</tool_call>": (
        '{"days": 3'
    ),
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Zür': '{"city": "Zür',
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Zür\n"}}</tool_call>': '{"city": "Zür\n"}',
    '<tool_call>{"name": "get_weather", "arguments": {"days": 1 1}}</tool_call>': '{"days": 1 1}',
    '<tool_call>{"name": "get_weather", "arguments": {"days": 1</tool_call>': '{"days": 1',
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_call_has_the_arguments_that_were_written(text: str) -> None:
    call = Call("get_weather", BROKEN[text])
    assert message(f"Look:\n\n{text}") == Message("Look:", "", (call,))
    assert message(text, thinking=True) == Message("", "", (call,))


def test_a_call_behind_a_broken_one_is_a_call() -> None:
    for text, written in BROKEN.items():
        if text.endswith("</tool_call>"):
            assert message(text + xml("get")).calls == (Call("get_weather", written), Call("get", "{}"))


@pytest.mark.parametrize("text", [xml("get_weather", city="Oslo", days="2"), CALL_IN_JSON], ids=["xml", "json"])
def test_a_call_that_breaks_off_cannot_be_run(text: str) -> None:
    """Its arguments are no JSON, not even the empty text that many clients read as no arguments."""
    (whole,) = message(text).calls
    for end in range(len(text)):
        parser = OutputParser(TOOLS)
        deltas = [*parser.feed(text[:end]), *parser.finish()]
        written = "".join(delta.text for delta in deltas if delta.kind == "arguments")
        assert parser.broken == (parser.calls == 1 and written != whole.arguments)
        if parser.broken:
            with pytest.raises(ValueError, match=r"char \d"):
                json.loads(written or "{}")


def test_nesting_without_end_is_no_harm() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    text = f'<tool_call>{{"name": "get_weather", "arguments": {{"days": {deep}}}}}</tool_call>'
    assert message(text).calls == (Call("get_weather", f'{{"days": {deep}}}'),)


def test_without_tools_calls_are_content() -> None:
    assert message(xml("get"), tools={}) == Message(xml("get"), "", ())


# While it comes


def shown(*pieces: str, tools: Tools = TOOLS) -> list[str]:
    """What each piece adds to the content at once."""
    parser = OutputParser(tools)
    return ["".join(d.text for d in parser.feed(piece) if d.kind == "content") for piece in pieces]


def test_text_is_held_back_no_longer_than_needed() -> None:
    assert shown("a", " ", "b", "<", "t", "ool", "s", ">") == ["a", "", " b", "", "", "", "<tools", ">"]
    assert shown("<tool_call>", "\n", "x") == ["", "", "<tool_call>\nx"]
    assert shown("<tool_call>\n<function=", "g", "x") == ["", "", "<tool_call>\n<function=gx"]
    assert shown("a ", "<", "tool_call>", tools={}) == ["a ", "<", "tool_call>"]


def test_a_call_is_announced_once_its_function_is_known() -> None:
    text = xml("get_weather", city="Zürich")
    parser = OutputParser(TOOLS)
    head, rest = text.split("<parameter=", 1)
    assert parser.feed(head) == []
    assert parser.feed("<parameter=") == [Delta("tool_call", "get_weather", 0), Delta("arguments", "{", 0)]
    assert parser.feed(rest)[0] == Delta("arguments", '"city": "Zürich"}', 0)


def fragments(*pieces: str) -> list[str]:
    parser = OutputParser(TOOLS)
    return ["".join(d.text for d in parser.feed(piece) if d.kind == "arguments") for piece in pieces]


def test_arguments_come_in_fragments() -> None:
    head = "<tool_call>\n<function=get_weather>\n"
    pieces = ("<parameter=city>\n", "Zü", 'rich "', "\n", "</b>", "\n", "</parameter>", "\n</function>")
    assert fragments(head, *pieces) == ["", '{"city": "', "Zü", 'rich \\"', "", "\\n</b>", "", '"', "}"]
    json_pieces = ('<tool_call>{"name": "get_weather", "arguments": ', '{"ci', 'ty": "Zü', '"}', "}</tool_call>")
    assert fragments(*json_pieces) == ["", '{"ci', 'ty": "Zü', '"}', ""]


def test_a_value_that_needs_its_end_waits_for_it() -> None:
    head = "<tool_call>\n<function=get_weather>\n<parameter=days>\n"
    assert fragments(head, "1", "2", "\n</parameter>") == ['{"days": ', "", "", "12"]


def test_reasoning_and_content_are_emitted_as_they_come() -> None:
    parser = OutputParser(TOOLS)
    told: Sequence[list[Delta]] = [
        parser.feed(piece) for piece in ("<think>\n", "a", " b", "\n</think>\n", "\nc", "d")
    ]
    assert told == [
        [],
        [Delta("reasoning", "a")],
        [Delta("reasoning", " b")],
        [],
        [Delta("content", "c")],
        [Delta("content", "d")],
    ]
