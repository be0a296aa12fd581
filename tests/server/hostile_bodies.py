"""Random bodies for every route that leads to llguidance: mostly well-formed, often odd, sometimes deep or wide."""

import json
from random import Random
from typing import Any

from attacks import (
    CHAT,
    COUNT,
    HI,
    MESSAGES,
    TEXT,
    anthropic_tools,
    chain,
    rules,
    shaped,
    shaped_message,
    tools,
    wide,
)

KEYWORDS = ["type", "enum", "const", "properties", "required", "items", "anyOf", "oneOf", "allOf", "$ref", "pattern",
            "minLength", "maxLength", "minimum", "maximum", "multipleOf", "minItems", "maxItems", "prefixItems",
            "additionalProperties", "patternProperties", "format", "not", "if", "uniqueItems", "$defs", "x-guidance",
            "$id", "$anchor", "$dynamicRef", "dependentRequired", "propertyNames", "minProperties"]  # fmt: skip
TYPES = ["string", "integer", "number", "boolean", "null", "array", "object"]
TEXTS = ["", "a", "é", "中文", "\u0000", "\ud7ff", "a b", '"', "\\", "/", "~1", "<|im_end|>", "</think>", "x" * 300]
PATTERNS = ["a+", "^[a-z]{1,9}$", "(a|b)*c", ".*", "[", "(?=a)", r"\d{3}-\d{4}", r"\p{L}+", "(a{1,99}){1,99}", "^$",
            r"\u0041", "(?i)abc", "[^\\x00-\\xff]", "a{0,10000}", "(.*a){30}", "a|" * 200]  # fmt: skip
FORMATS = ["date-time", "email", "uuid", "uri", "ipv4", "nonsense"]
NUMBERS = [0, 1, -1, 5, 1e308, -1e-308, 10**30, 0.1, 2**63, 2**64, -(2**63)]


def body(random: Random) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a request."""
    kind = random.randrange(10)
    if kind < 2:
        return CHAT, thinking(random, shaped(schema(random)))
    if kind == 2:
        return MESSAGES, shaped_message(schema(random))
    if kind == 3:
        return TEXT, {"prompt": "a", **shaped(schema(random))}
    if kind == 4:
        return CHAT, thinking(random, several_tools(random))
    if kind == 5:
        return random.choice([MESSAGES, COUNT]), anthropic_tools(random.randrange(1, 4), schema(random))
    if kind == 6:
        return CHAT, {**shaped(schema(random)), "tools": several_tools(random)["tools"]}
    field, source = ("guided_regex", expression(random)) if kind == 7 else ("grammar", grammar(random))
    if random.random() < 0.5:
        return TEXT, {"prompt": "a", "max_tokens": 4, field: source}
    return CHAT, thinking(random, {**HI, field: source})


def thinking(random: Random, body: dict[str, Any]) -> dict[str, Any]:
    if random.random() < 0.3:
        return {**body, "enable_thinking": True, "thinking_budget": random.choice([0, 1, 50, 10**6])}
    return body


def several_tools(random: Random) -> dict[str, Any]:
    found = tools(random.randrange(1, 6), schema(random))
    if random.random() < 0.2:
        found["tool_choice"] = {"type": "function", "function": {"name": "f0"}}
    return found


def schema(random: Random) -> Any:
    """Return a JSON Schema, or something like one."""
    kind = random.random()
    if kind < 0.03:
        return chain(random.choice([5, 100, 340, 2_000]), bare=random.random() < 0.5)
    if kind < 0.05:
        return wide(random.choice([10, 100, 300]))
    if kind < 0.08:
        deep: Any = {"type": "null"}
        for _ in range(random.choice([10, 40, 60])):
            deep = random.choice(
                [{"items": deep}, {"anyOf": [deep]}, {"properties": {"a": deep}}, {"allOf": [deep, {}]}]
            )
        return deep
    names = [f"d{i}" for i in range(random.randrange(4))]
    found = part(random, 0, names)
    if names and isinstance(found, dict):
        found["$defs"] = {name: part(random, 1, names) for name in names}
    return found


def part(random: Random, depth: int, names: list[str]) -> Any:
    if depth > 4 or random.random() < 0.1:
        return random.choice([True, False, {}, {"type": random.choice(TYPES)}, {"type": "thing"}, None, 5, "x", []])
    words = random.sample(KEYWORDS, random.randrange(1, 4))
    return {word: value(random, word, depth + 1, names) for word in words}


def value(random: Random, word: str, depth: int, names: list[str]) -> Any:
    def inner() -> Any:
        return part(random, depth, names)

    if random.random() < 0.03:
        return random.choice([None, True, 5, "x", [], {}, [[]], {"a": None}])
    match word:
        case "type":
            return random.choice([*TYPES, random.sample(TYPES, 2)])
        case "enum":
            return [random.choice([*TEXTS, *NUMBERS, None, True, {"a": 1}, [1]]) for _ in range(random.randrange(9))]
        case "const":
            return random.choice([*TEXTS, *NUMBERS, None, {"a": [1, "b"]}])
        case "properties" | "patternProperties" | "$defs":
            return {random.choice([*TEXTS, *PATTERNS, *names]): inner() for _ in range(random.randrange(4))}
        case "anyOf" | "oneOf" | "allOf" | "prefixItems":
            return [inner() for _ in range(random.randrange(4))]
        case "required":
            return random.sample(TEXTS, random.randrange(3))
        case "$ref" | "$dynamicRef":
            place = random.choice([*names, "nothing"])
            return random.choice(
                [f"#/$defs/{place}", "#", "#/properties/a", "https://example.org/x", f"#{place}", "/"]
            )
        case "$id" | "$anchor":
            return random.choice(["a", "https://example.org/x", "#", ""])
        case "pattern":
            return random.choice(PATTERNS)
        case "format":
            return random.choice(FORMATS)
        case "x-guidance":
            return random.choice([{"whitespace_pattern": random.choice(PATTERNS)}, {"lenient": True}, {"x": 1}, 5])
        case "items" | "additionalProperties" | "not" | "if" | "propertyNames":
            return inner()
        case "uniqueItems":
            return True
        case "dependentRequired":
            return {"a": ["b"]}
    return random.choice(NUMBERS)


def expression(random: Random) -> str:
    found = random.choice(PATTERNS)
    for _ in range(random.randrange(6)):
        shape = random.choice(
            ["({})*", "({}|{})", "{}{}", "({}){{2,9}}", "[^a]{}", "(?:{})?", "({})+x", "{}$", "(", "\\"]
        )
        found = shape.replace("{}", found) if len(found) < 500 else found
    return found


def grammar(random: Random) -> str:
    """Return a Lark grammar, or something like one."""
    if random.random() < 0.05:
        return rules(random.choice([5, 1_000, 3_000, 6_000]))
    names = ["start", *(f"r{i}" for i in range(random.randrange(5)))]
    lines = [
        f"{name}{random.choice(['', '', '', '[lazy]', '[max_tokens=5]'])}: {rule(random, names)}" for name in names
    ]
    if random.random() < 0.3:
        lines.append(f"T: /{random.choice(PATTERNS)}/")
    if random.random() < 0.2:
        lines.append(
            random.choice(["%ignore / /", "%import common.INT", "%llguidance {}", "%unknown", "start: start"])
        )
    return "\n".join(lines)


def rule(random: Random, names: list[str], depth: int = 0) -> str:
    def inner() -> str:
        return rule(random, names, depth + 1)

    kind = random.randrange(12) if depth < 4 else random.randrange(5)
    match kind:
        case 0:
            return json.dumps(random.choice(TEXTS), ensure_ascii=random.random() < 0.5)
        case 1:
            return f"/{random.choice(PATTERNS)}/"
        case 2:
            return random.choice([*names, "T", "nothing"])
        case 3:
            return random.choice(["<[5]>", "<[*]>", "<[^5,6]>", "<[99999999]>", "<|im_end|>", "<[0-5]>", "<nothing>"])
        case 4:
            return f"%json {json.dumps(schema(random))}"
        case 5:
            return f"({inner()} | {inner()})"
        case 6:
            return f"{inner()} {inner()}"
        case 7:
            return f"({inner()}){random.choice(['*', '+', '?', '{2,5}', '{0,9999}', '{5,2}'])}"
        case 8:
            return f"[{inner()}]"
        case 9:
            return f"%lark {{\nstart: {inner()}\n}}"
        case 10:
            return f"{inner()} & {inner()}" if random.random() < 0.3 else f"{inner()} |"
    return f"({inner()})" * random.randrange(1, 3)
