"""Requests that once ended or blocked the server, one line per attack. bench/hostile.py uses them too."""

import json
from typing import Any

from hostile import Case

CHAT, TEXT, MESSAGES, COUNT = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens"
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def chain(links: int, *, bare: bool = False) -> dict[str, Any]:
    """Return a schema that refers on and on, through objects or directly."""

    def link(i: int) -> dict[str, Any]:
        ref = {"$ref": f"#/$defs/d{i + 1}"}
        return ref if bare else {"type": "object", "properties": {"x": ref}, "required": ["x"]}

    last = {f"d{links}": {"type": "null"}}
    return {"$defs": {f"d{i}": link(i) for i in range(links)} | last, "$ref": "#/$defs/d0"}


def wide(properties: int) -> dict[str, Any]:
    """Return a schema that takes llguidance a time that grows with the square of its size."""
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(properties)}}


def rules(count: int) -> str:
    return "start: r0\n" + "".join(f'r{i}: "a" r{i + 1} | "b"\n' for i in range(count)) + f'r{count}: "z"'


def shaped(schema: Any) -> dict[str, Any]:
    return {**HI, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def shaped_message(schema: Any) -> dict[str, Any]:
    return {**HI, "output_config": {"format": {"type": "json_schema", "schema": schema}}}


def tools(count: int, schema: Any = None, **fields: Any) -> dict[str, Any]:
    function = {"parameters": schema} if schema is not None else {}
    listed = [{"type": "function", "function": {"name": f"f{i}", **function}} for i in range(count)]
    return {**HI, "tools": listed, "tool_choice": "required", **fields}


def anthropic_tools(count: int, schema: Any) -> dict[str, Any]:
    listed = [{"name": f"f{i}", "input_schema": schema} for i in range(count)]
    return {**HI, "tools": listed, "tool_choice": {"type": "any"}}


def long(text: str) -> dict[str, Any]:
    return {**HI, "messages": [{"role": "user", "content": text}]}


def lark(grammar: str) -> dict[str, Any]:
    return {"prompt": "a", "max_tokens": 4, "grammar": grammar}


def with_values(count: int) -> bytes:
    return json.dumps(HI)[:-1].encode() + b', "x": [' + b"[]," * count + b"[]]}"


INVALID, LONG = "invalid_value", "context_length_exceeded"

GRAMMARS = [
    Case("a chain of references", CHAT, shaped(chain(1_000)), 400, INVALID),
    Case("a chain of bare references", CHAT, shaped(chain(3_000, bare=True)), 400, INVALID),
    Case("the same for a completion", TEXT, {"prompt": "a", **shaped(chain(1_000))}, 400, INVALID),
    Case("the same for a message", MESSAGES, shaped_message(chain(1_000)), 400, None),
    Case("the same in a tool that must be called", CHAT, tools(1, chain(1_000)), 400, LONG),
    Case("the same in a message's tool", MESSAGES, anthropic_tools(1, chain(1_000)), 400, None),
    Case("the same after a thought", CHAT, {**shaped(chain(1_000)), "thinking_budget": 5}, 400, INVALID),
    Case("the same within a Lark grammar", TEXT, lark(f"start: %json {json.dumps(chain(8_000))}"), 400, INVALID),
    Case("a chain of rules", TEXT, lark(rules(5_000)), 400, INVALID),
    Case("a chain of rules in a chat", CHAT, {**HI, "grammar": rules(5_000)}, 400, INVALID),
    Case("a schema of too many values", CHAT, shaped({"enum": list(range(20_000))}), 400, INVALID),
    Case("tools of too many values", CHAT, tools(300, wide(20)), 400, INVALID),
    Case("deep brackets in a rule", TEXT, lark("start: " + "(" * 50_000 + '"a"' + ")" * 50_000), 400, INVALID),
    Case("deep brackets in an expression", TEXT, {**HI, "prompt": "a", "guided_regex": "(" * 9_000}, 400, INVALID),
    Case("an expression of a megabyte", TEXT, {**HI, "prompt": "a", "guided_regex": "a" * 2**20}, 400, INVALID),
    Case("a choice that needs too many states", CHAT,
         shaped({"anyOf": [{"type": "string", "minLength": i, "maxLength": 2 * i + 1} for i in range(300)]}),
         400, INVALID),
]  # fmt: skip

PROMPTS = [
    Case("10 MB of words", TEXT, {"prompt": "word " * 2_000_000}, 400, LONG),
    Case("10 MB of spaces", TEXT, {"prompt": " " * 10_000_000}, 400, LONG),
    Case("10 MB of words in a chat", CHAT, long("word " * 2_000_000), 400, LONG),
    Case("10 MB of words in a message", MESSAGES, long("word " * 2_000_000), 400, None),
    Case("10 MB of words to count", COUNT, long("word " * 2_000_000), 400, None),
    Case("a text that must be counted", TEXT, {"prompt": "word " * 50_000}, 400, LONG),
    Case("a chat that must be counted", CHAT, long("a" * 200_000), 400, LONG),
    Case("many messages", CHAT, {**HI, "messages": HI["messages"] * 16_000}, 400, LONG),
    Case("many tokens", TEXT, {"prompt": [1] * 100_000}, 400, LONG),
    Case("many tools", CHAT, tools(16_384), 400, INVALID),
    Case("many tools in a message", MESSAGES, anthropic_tools(16_384, {}), 400, None),
    Case("many values", CHAT, with_values(3_000_000), 413, "request_too_large"),
]
