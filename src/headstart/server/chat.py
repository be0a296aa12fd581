"""A conversation in the form that chat templates take, whichever API it came by, and the template that renders it."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..sampling import GrammarSpec
from ..sampling.bounds import MAX_NODES, count_nodes
from .encode import Encoder, MarkedText, splits_thoughts
from .errors import refuse
from .markup import Markup, Tools, any_of, call_grammar, schema_problem

Objects = Sequence[Mapping[str, Any]]  # messages or tools, as templates take them


@dataclass(frozen=True)
class Chat:
    messages: Objects
    tools: Objects = ()  # {"type": "function", "function": {"name", "description", "parameters"}}
    schema_field: str = "function.parameters"  # of a tool
    tool_choice: str = "auto"  # or none, required
    tool: str | None = None  # the one that must be called
    parallel_calls: bool = True
    thinking: bool | None = None  # None: the template's default
    thinking_field: str = "enable_thinking"  # the field that asked for it
    budget: int | None = None  # most tokens of reasoning
    budget_field: str = "thinking_budget"  # the field that set it
    template_options: Mapping[str, Any] = field(default_factory=dict)
    grammar: GrammarSpec | None = None  # of the answer after the reasoning
    grammar_field: str = "response_format"  # the field that asked for it

    @property
    def callable_tools(self) -> Tools:
        """Return the tools that the answer may call."""
        if self.tool_choice == "none":
            return {}
        functions = [tool["function"] for tool in self.tools]
        schemas = {each["name"]: each.get("parameters") or {} for each in functions}
        return schemas if self.tool is None else {self.tool: schemas[self.tool]}

    @property
    def must_call(self) -> bool:
        return self.tool is not None or self.tool_choice == "required"

    def check(self, markup: Markup) -> None:
        """Reject what this model, or any, cannot do."""
        functions = [tool["function"] for tool in self.tools]
        names = [function["name"] for function in functions]
        if self.tools and markup.style is None:
            refuse("tools", "the model's chat template does not support tools: leave them out", "unsupported")
        if twice := next((name for name, count in Counter(names).items() if count > 1), None):
            refuse("tools", f"{twice!r} is defined twice: give every tool its own name")
        if sum(count_nodes(function.get("parameters")) for function in functions) > MAX_NODES:
            refuse("tools", f"their schemas have more than {MAX_NODES:,} values together: simplify them")
        for i, function in enumerate(functions):
            if problem := schema_problem(function.get("parameters") or {}):
                refuse(self._schema_field(i), f"{problem}: send a JSON Schema")
        if self.must_call and not self.tools:
            refuse("tool_choice", "requires a tool call, but there are no tools: send some")
        if self.tool is not None and self.tool not in names:
            refuse("tool_choice", f"{self.tool!r} is not one of the tools: name one of them")
        if self.must_call and self.grammar is not None:
            refuse(self.grammar_field, "cannot be combined with a tool_choice that requires a call: leave out one")
        if self.thinking and not markup.thinks:
            refuse(self.thinking_field, "this model does not think: leave it out", "unsupported")
        if self.budget is not None and self.budget < 0:
            refuse(self.budget_field, f"is {self.budget}; it must be 0 or more tokens")

    def grammar_after_reasoning(self, markup: Markup) -> GrammarSpec | None:
        """Return the grammar of what follows the reasoning. If there are tools, a call is always an answer."""
        tools = self.callable_tools
        if not tools or not (self.must_call or self.grammar):
            return self.grammar
        calls = call_grammar(tools, markup, parallel=self.parallel_calls and self.tool is None)
        return calls if self.grammar is None else any_of(self.grammar, calls)

    def grammars_by_tool(self, markup: Markup) -> Iterator[tuple[GrammarSpec, str]]:
        """Yield the grammar of a call of each tool, and the field of its schema."""
        tools = self.callable_tools
        for i, tool in enumerate(self.tools):
            if (name := tool["function"]["name"]) in tools:
                yield call_grammar({name: tools[name]}, markup), self._schema_field(i)

    def _schema_field(self, index: int) -> str:
        return f"tools[{index}].{self.schema_field}"


class ChatTemplate:
    def __init__(self, tokenizer: TokenizerWrapper):
        self._tokenizer = tokenizer

    @cached_property
    def markup(self) -> Markup:
        return Markup.of(self._tokenizer)

    def render(self, chat: Chat, encoder: Encoder) -> tuple[MarkedText, bool]:
        """Return the text of a prompt, and whether a system message had to become a user message."""
        self._check(chat)
        messages, role_changed = chat.messages, False
        if any(map(_is_system, messages[1:])) and not self._takes_system_messages_anywhere:
            messages, role_changed = _with_one_system_message(messages)
        # None lets the template's own default hold, where mlx-lm would set True.
        options = {"enable_thinking": chat.thinking, **chat.template_options}
        conversation = (messages, chat.tools if chat.callable_tools else None, options)
        try:
            text = encoder.render(self._apply, conversation, splits_thoughts=self._splits_thoughts)
        except (TemplateError, TypeError, ValueError) as error:  # whatever a template does with its input
            refuse("messages", f"the model's chat template rejects them: {error}")
        return text, role_changed

    def _check(self, chat: Chat) -> None:
        if not self._tokenizer.has_chat_template:
            refuse("messages", "the model has no chat template: use /v1/completions", "unsupported")
        arguments = signature(self._tokenizer._tokenizer.apply_chat_template).parameters
        if reserved := sorted(arguments.keys() & chat.template_options.keys()):
            refuse("chat_template_kwargs", f"{', '.join(reserved)} cannot be set by clients: leave it out")

    def _apply(self, messages: Objects, tools: Objects | None, options: Mapping[str, Any]) -> str:
        tools = list(tools) if tools is not None else None
        apply = self._tokenizer.apply_chat_template
        return str(apply(list(messages), tools=tools, add_generation_prompt=True, tokenize=False, **options))

    @cached_property
    def _splits_thoughts(self) -> bool:
        try:
            return splits_thoughts(self._apply)
        except TemplateError:
            return False

    @cached_property
    def _takes_system_messages_anywhere(self) -> bool:
        """Return whether the template writes system messages where they are. Some reject or drop late ones."""
        word, roles = "perhaps", ("system", "user", "assistant", "system", "user")
        messages = [{"role": role, "content": word} for role in roles]
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False)).count(word) == len(roles)
        except TemplateError:
            return False


def _with_one_system_message(messages: Objects) -> tuple[Objects, bool]:
    """Join the system messages at the start and make late ones, which agents send, user messages.

    Late ones stay in place. Moved to the front they would change the prefix, and no prompt would be found in the
    prefix cache. Returns the messages, and whether there were late ones.
    """
    first = list(takewhile(_is_system, messages))
    joined = [{**first[0], "content": "\n\n".join(each["content"] for each in first)}] if first else []
    others = messages[len(first) :]
    rest = [{**each, "role": "user"} if _is_system(each) else each for each in others]
    return [*joined, *rest], any(map(_is_system, others))


def _is_system(message: Mapping[str, Any]) -> bool:
    return bool(message["role"] == "system")
