"""A conversation, which all APIs make of their messages and tools, and the template that writes it as text."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from itertools import takewhile
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checkpoint.template import template_problem
from ..errors import printable_error
from ..sampling import GrammarSpec
from ..sampling.bounds import MAX_NODES, count_nodes
from .errors import refuse
from .markup import Markup, Tools, any_of, call_grammar
from .worker import Encoder, MarkedText

MAX_BUDGET = 2**31 - 1  # tokens of reasoning: the most that a grammar counts

Objects = Sequence[Mapping[str, Any]]  # messages or tools, as templates take them


@dataclass(frozen=True)
class Chat:
    messages: Objects
    tools: Objects = ()  # {"type": "function", "function": {"name", "description", "parameters"}}
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
    param: str = "messages"  # the field that the messages came in
    generation_prompt: bool = True  # end the prompt where the assistant's next message begins
    continues: bool = False  # end it within the last message
    body: object = None  # the request, in which images are found to name those at fault

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
        if not self.messages:
            refuse(self.param, "no messages: send at least one")
        functions = [tool["function"] for tool in self.tools]
        names = [function["name"] for function in functions]
        if self.tools and markup.style is None:
            refuse("tools", "the model's chat template does not support tools: leave them out", "unsupported")
        if twice := next((name for name, count in Counter(names).items() if count > 1), None):
            refuse("tools", f"{twice!r} is defined twice: give every tool its own name")
        if sum(count_nodes(function.get("parameters")) for function in functions) > MAX_NODES:
            refuse("tools", f"their schemas have more than {MAX_NODES:,} values together: simplify them")
        if self.must_call and not self.tools:
            refuse("tool_choice", "requires a tool call, but there are no tools: send some")
        if self.tool is not None and self.tool not in names:
            refuse("tool_choice", f"{self.tool!r} is not one of the tools: name one of them")
        if self.must_call and self.grammar is not None:
            refuse(self.grammar_field, "cannot be combined with a tool_choice that requires a call: leave out one")
        if self.thinking and not markup.thinks:
            refuse(self.thinking_field, "this model does not think: leave it out", "unsupported")
        if self.budget is not None and not 0 <= self.budget <= MAX_BUDGET:
            refuse(self.budget_field, f"is {self.budget}; it must be 0 to {MAX_BUDGET:,} tokens")

    def grammar_after_reasoning(self, markup: Markup) -> GrammarSpec | None:
        """Return the grammar of what follows the reasoning. If there are tools, a call is always an answer."""
        tools = self.callable_tools
        if not tools or not (self.must_call or self.grammar):
            return self.grammar
        calls = call_grammar(tools, markup, parallel=self.parallel_calls and self.tool is None)
        return calls if self.grammar is None else any_of(self.grammar, calls)


class ChatTemplate:
    def __init__(self, tokenizer: TokenizerWrapper):
        self._tokenizer = tokenizer

    @cached_property
    def markup(self) -> Markup:
        return Markup.of(self._tokenizer)

    def render(self, chat: Chat, encoder: Encoder) -> MarkedText:
        """Return the text of a prompt."""
        self._check(chat)
        messages = chat.messages
        if any(map(_is_system, messages[1:])) and not self._takes_system_messages_anywhere:
            messages = _with_one_system_message(messages)
        if any(map(_has_text_arguments, messages)) and not self._takes_text_arguments:
            messages = [_with_argument_objects(message) for message in messages]
        # None lets the template's own default hold, where mlx-lm would set True.
        options = {"enable_thinking": chat.thinking, **chat.template_options}
        options |= {"add_generation_prompt": chat.generation_prompt, "continue_final_message": chat.continues}
        conversation = (messages, chat.tools if chat.callable_tools else None, options)
        try:
            rendered = encoder.render(self._apply, conversation)
            rendered[0].encode()  # raises where it holds half a character
            return rendered
        except Exception as error:  # whatever a template does with its input
            refuse(chat.param, f"the model's chat template rejects them: {printable_error(error)}")

    def _check(self, chat: Chat) -> None:
        if not self._tokenizer.has_chat_template:
            refuse(chat.param, "the model has no chat template: use /v1/completions", "unsupported")
        if problem := template_problem(self._tokenizer):
            message = f"the model's chat template is not used: {problem}: use /v1/completions"
            refuse(chat.param, message, "unsupported")
        arguments = signature(self._tokenizer._tokenizer.apply_chat_template).parameters
        if reserved := sorted(arguments.keys() & chat.template_options.keys()):
            refuse("chat_template_kwargs", f"{', '.join(reserved)} cannot be set by clients: leave it out")

    def _apply(self, messages: Objects, tools: Objects | None, options: Mapping[str, Any]) -> str:
        tools = list(tools) if tools is not None else None
        apply = self._tokenizer.apply_chat_template
        return str(apply(list(messages), tools=tools, tokenize=False, **options))

    @cached_property
    def _takes_system_messages_anywhere(self) -> bool:
        """Return whether the template writes system messages where they are. Some reject or drop late ones."""
        word, roles = "perhaps", ("system", "user", "assistant", "system", "user")
        messages = [{"role": role, "content": word} for role in roles]
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False)).count(word) == len(roles)
        except Exception:
            return False

    @cached_property
    def _takes_text_arguments(self) -> bool:
        """Return whether the template writes the arguments of calls that are text, which malformed ones are."""
        call = {"type": "function", "id": "123456789", "function": {"name": "perhaps", "arguments": "{perhaps"}}
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            return "{perhaps" in str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception:
            return False


def _has_text_arguments(message: Mapping[str, Any]) -> bool:
    return any(isinstance(call["function"]["arguments"], str) for call in message.get("tool_calls", ()))


def _with_argument_objects(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message in which arguments that are text are the one argument of their call."""
    if not _has_text_arguments(message):
        return message
    calls = []
    for call in message["tool_calls"]:
        function, arguments = call["function"], call["function"]["arguments"]
        known = {"arguments": arguments} if isinstance(arguments, str) else arguments
        calls.append({**call, "function": {**function, "arguments": known}})
    return {**message, "tool_calls": calls}


def _with_one_system_message(messages: Objects) -> Objects:
    """Join the system messages at the start and make late ones, which agents send, user messages.

    Late ones stay in place. Moved to the front they would change the prefix, and no prompt would be found in the
    prefix cache.
    """
    first = list(takewhile(_is_system, messages))
    joined = [{**first[0], "content": "\n\n".join(each["content"] for each in first)}] if first else []
    rest = [{**each, "role": "user"} if _is_system(each) else each for each in messages[len(first) :]]
    return [*joined, *rest]


def _is_system(message: Mapping[str, Any]) -> bool:
    return bool(message["role"] == "system")
