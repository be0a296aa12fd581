"""Grammars that force a tool call, and that limit the reasoning before an answer.

Markers are token ids if the tokenizer has them as single tokens, since text in a grammar never matches those. The
reasoning budget is a number of tokens, none of which ends the reasoning. llguidance's own `max_tokens` cannot look
ahead through draft tokens and roll back.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import regex
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ...sampling import GrammarSpec
from ...sampling.grammar import LENIENT, json_options
from .gemma import CHANNEL, CHANNEL_END, GEMMA_CALL, GEMMA_CALL_END, QUOTE, THOUGHT, gemma_functions
from .output_parser import CALL, CALL_END, FUNCTION, THINK, THINK_END
from .schema import STRING, Permitted, Schema, Tools, as_list, permitted

ThinkingState = Literal["started", "finished", "undecided"]  # at the end of a prompt

_COMPACT = {"whitespace_pattern": " ", **LENIENT}  # as templates write the arguments of calls


@dataclass(frozen=True)
class Markup:
    """The markers of a model's tool calls and reasoning, and how it writes calls."""

    style: Literal["xml", "json", "gemma"] | None  # None: the template has no calls that can be parsed here
    ids: Mapping[str, int]  # of the markers that are one token
    think: str = THINK
    think_end: str = THINK_END
    call: str = CALL
    call_end: str = CALL_END
    named: str = ""  # text after `think`
    gap: str = r'"\n\n"'  # between reasoning and answer, as a grammar has it

    @classmethod
    def of(cls, tokenizer: TokenizerWrapper) -> "Markup":
        """Infer them from the chat template. mlx-lm does too, but misses templates with other variable names."""
        vocabulary, template = tokenizer.get_vocab(), tokenizer.chat_template or ""
        text = template if isinstance(template, str) else "\n".join(template.values())
        style: Literal["xml", "json"] | None = None
        if GEMMA_CALL in text:
            named = CHANNEL, CHANNEL_END, GEMMA_CALL, GEMMA_CALL_END
            ids = {marker: vocabulary[marker] for marker in (*named, QUOTE) if marker in vocabulary}
            return cls("gemma", ids, *named, f"{THOUGHT}\n", "")
        if CALL in text:
            style = "xml" if FUNCTION in text else "json" if '"arguments"' in text else None
        markers = (THINK, THINK_END, CALL, CALL_END)
        return cls(style, {marker: vocabulary[marker] for marker in markers if marker in vocabulary})

    @property
    def thinks(self) -> bool:
        return self.think in self.ids and self.think_end in self.ids

    def marker(self, marker: str) -> str:
        """Return a marker as a grammar has it."""
        return f"<[{self.ids[marker]}]>" if marker in self.ids else _literal(marker)


def thinking_state(prompt: Sequence[int], tokenizer: TokenizerWrapper) -> ThinkingState:
    """Return whether the template has opened the reasoning, left an empty one, or left it to the model."""
    end = str(tokenizer.decode(list(prompt[-8:]))).rstrip()
    if end.endswith(THINK):
        return "started"
    return "finished" if end.endswith((THINK_END, CHANNEL_END)) else "undecided"


def call_grammar(tools: Tools, markup: Markup, *, parallel: bool = True) -> GrammarSpec:
    """Return a grammar of one call of one of these tools, or of several in a row, and nothing else."""
    functions = " | ".join(f"f{i}" for i in range(len(tools)))
    if markup.style == "gemma":
        start = "start: call+" if parallel else "start: call"
        call = f"call: {markup.marker(GEMMA_CALL)} ({functions}) {markup.marker(GEMMA_CALL_END)}"
        return GrammarSpec("lark", "\n".join([start, call, *gemma_functions(tools, markup.marker(QUOTE), _json)]))
    start = r'start: call ("\n" call)*' if parallel else "start: call"
    call = rf'call: {markup.marker(CALL)} "\n" ({functions}) "\n" {markup.marker(CALL_END)}'
    rules = _xml_functions(tools) if markup.style == "xml" else _json_functions(tools)
    return GrammarSpec("lark", "\n".join([start, call, *rules]))


def with_thinking(
    answer: GrammarSpec | None, markup: Markup, state: ThinkingState, *, budget: int | None = None, calls: bool = True
) -> GrammarSpec | None:
    """Return a grammar of reasoning of at most `budget` tokens, followed by `answer`.

    Without an `answer` anything may follow, and until the budget is spent the output may end while reasoning, as it
    may without a grammar. `calls`: whether a tool call may be opened while reasoning.
    """
    if not markup.thinks or state == "finished" or (answer is None and budget is None):
        return answer
    markers = (markup.think_end,) if calls else (markup.think_end, markup.call)
    excluded = [markup.ids[marker] for marker in markers if marker in markup.ids]
    opening = markup.marker(markup.think) + (f" {_literal(markup.named)}" if markup.named else "")
    reasoning = f"{_tokens_except(excluded, budget)} {markup.marker(markup.think_end)}"
    if answer is None:
        start = f"{reasoning} <[*]>*"
        if budget:
            start = f"({start} | {_tokens_except(excluded, budget - 1)})"
        if state == "undecided":
            start = f"{opening} {start} | (<[^{markup.ids[markup.think]}]> <[*]>*)?"
        return GrammarSpec("lark", f"start: {start}")
    start = f"{reasoning} {markup.gap}"
    if state == "undecided":
        start = f"({opening} {start})?"
    return GrammarSpec("lark", f"start: {start} answer\nanswer: {_as_rule(answer)}")


def any_of(one: GrammarSpec, other: GrammarSpec) -> GrammarSpec:
    """Return a grammar of what either of two permits."""
    return GrammarSpec("lark", f"start: one | other\none: {_as_rule(one)}\nother: {_as_rule(other)}")


def _tokens_except(excluded: list[int], most: int | None) -> str:
    token = f"<[^{','.join(map(str, excluded))}]>"
    return "" if most == 0 else token + ("*" if most is None else f"{{0,{most}}}")


def _as_rule(spec: GrammarSpec) -> str:
    """Return the body of a Lark rule for a grammar of any kind."""
    match spec.kind:
        case "lark":
            return f"%lark {{\n{spec.source}\n}}"
        case "regex":
            escaped = regex.sub(r"\\.|/", lambda found: r"\/" if found.group() == "/" else found.group(), spec.source)
            return "/" + escaped.replace("\n", r"\n") + "/"
    return _json(json.loads(spec.source) if spec.kind == "json_schema" else {"type": "object"}, json_options(spec))


def _json(schema: Any, options: Any = _COMPACT) -> str:
    if isinstance(schema, Mapping):
        schema = {**schema, "x-guidance": options}
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json_functions(tools: Tools) -> Iterator[str]:
    for i, (name, schema) in enumerate(tools.items()):
        head = _literal(f'{{"name": {_literal(name)}, "arguments": ')
        closed = {"additionalProperties": False} if "properties" in schema else {}
        yield f'f{i}: {head} {_json({"type": "object", **closed, **schema})} "}}"'


def _xml_functions(tools: Tools) -> Iterator[str]:
    """Write rules with the schema's parameters only, in its order, and all that it requires."""
    yield r"text[lazy]: /(?s:.*)<\/parameter>/"
    yield r'any: "<parameter=" /[^\s<>]{1,64}/ ">\n" text "\n"'
    for i, (name, schema) in enumerate(tools.items()):
        properties, required = schema.get("properties"), as_list(schema.get("required"))
        known: dict[str, Permitted] = {}
        parts = "any*"
        if isinstance(properties, Mapping):
            parts = " ".join(f"f{i}p{j}" + ("" if key in required else "?") for j, key in enumerate(properties))
        yield f'f{i}: {_literal(f"{FUNCTION}{name}>" + chr(10))} {parts} "</function>"'
        for j, (key, each) in enumerate(properties.items() if isinstance(properties, Mapping) else ()):
            value = _xml_value(each, schema, known)
            yield rf'f{i}p{j}: {_literal(f"<parameter={key}>" + chr(10))} {value} "\n"'


def _xml_value(schema: Any, root: Schema, known: dict[str, Permitted]) -> str:
    """Return the rule of a value and its end tag. Of a string's constraints only a choice of strings is kept."""
    found = permitted(schema, root, known)
    strings = found.strings if found.types >= STRING else frozenset()
    if strings is None:
        return "text"
    choices = [_literal(word) for word in sorted(strings)]
    if found.types != STRING:
        others = {"allOf": [schema, {"type": sorted(found.types - STRING)}]} if choices else schema
        choices.append(_json({word: root[word] for word in ("$defs", "definitions") if word in root} | others))
    return f"({' | '.join(choices)})" + r' "\n</parameter>"'
