"""From a conversation or a text to the tokens and the grammar that the engine gets.

All APIs make a `Chat` of their messages and tools. The model's ChatTemplate renders it, and `chat_prompt` makes a
`Prompt` of that; `text_prompt` makes one of a text that is to be continued.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import signature
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checkpoint.template import template_problem
from ..engine import PromptImage, insert_images
from ..errors import RequestError, printable_error
from ..sampling import GrammarSpec
from ..sampling.bounds import MAX_NODES, count_nodes
from ..sampling.grammar import Grammar
from .errors import Refusal, refuse
from .images import ImagePart, check_images_allowed, count_characters, read_images, take_images
from .markup import CALL, Markup, OutputParser, Tools, any_of, call_grammar, thinking_state, with_thinking
from .prepare import Preparation
from .worker import Encoder, MarkedText

if TYPE_CHECKING:
    from .served_model import ServedModel

TextPrompt = str | list[int]  # text or token ids
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
        if self.budget is not None and self.budget < 0:
            refuse(self.budget_field, f"is {self.budget}; it must be 0 or more tokens")

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


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    param: str  # the field that it came in
    images: Sequence[PromptImage] = ()
    is_chat: bool = True  # otherwise all output is text
    thinking: bool = False  # it ends in an open `<think>`
    tools: Tools = field(default_factory=dict)  # that may be called
    calls_in_thoughts: bool = True
    grammar: GrammarSpec | None = None
    grammar_field: str = "tools"  # the field that its schema came in
    compiled: Grammar | None = None  # held so that the engine finds it in the cache of compiled grammars
    bias: Mapping[int, float] = field(default_factory=dict)  # against tool calls where none may come
    recommended: Mapping[str, Any] = field(default_factory=dict)  # sampling parameters, used where none are given

    def output_parser(self) -> OutputParser | None:
        """Return a parser for one output; None if all of it is text."""
        if not self.is_chat:
            return None
        return OutputParser(self.tools, thinking=self.thinking, calls_in_thoughts=self.calls_in_thoughts)


async def chat_prompt(make_chat: Callable[[], Chat], served: "ServedModel", work: Preparation) -> Prompt:
    """Check, render and tokenise a conversation, and compile the grammar of its answer."""
    markup = served.template.markup

    def render() -> tuple[Chat, list[ImagePart], str, str]:
        chat = make_chat()
        messages, parts = take_images(chat.messages)
        chat = replace(chat, messages=messages)
        check_images_allowed(parts, served.model, chat.body)
        work.check_characters(sum(map(count_characters, messages)), chat.param)
        chat.check(markup)
        return chat, parts, *served.template.render(chat, work.preparer.encoder)

    chat, parts, text, mark = await work.run(render)
    tokens = await work.encode(text, chat.param, kind="chat", mark=mark)
    images: Sequence[PromptImage] = ()
    if parts and (tower := served.model.tower) is not None:
        pixels = await read_images(parts, tower.rules, chat.body, work)
        try:
            tokens, images = await work.run(insert_images, tokens, pixels, tower)
        except RequestError as error:
            refuse(chat.param, f"the model's chat template does not place images: {error}", "unsupported")
        work.check_tokens(tokens, chat.param)
    state = thinking_state(tokens, served.tokenizer)
    chat = replace(chat, grammar=await work.as_lark(chat.grammar, chat.grammar_field))
    await work.grammar(chat.grammar, chat.grammar_field)  # alone first, so that its size is checked by its kind
    answer = await work.run(chat.grammar_after_reasoning, markup) if chat.tools else chat.grammar
    # If a grammar requires the call after the reasoning, one inside it would be one too many.
    calls_in_thoughts = answer is None or not chat.callable_tools
    grammar = with_thinking(answer, markup, state, budget=chat.budget, calls=calls_in_thoughts)
    tools = chat.callable_tools
    try:
        compiled = await work.grammar(grammar, chat.budget_field if chat.budget is not None else chat.grammar_field)
    except Refusal:
        if answer is not chat.grammar:  # find the tool at fault
            for i, name in enumerate(tool["function"]["name"] for tool in chat.tools):
                spec = await work.run(call_grammar, {name: tools[name]}, markup) if name in tools else None
                await work.grammar(spec, f"tools[{i}]")
            await work.grammar(answer, "tools")
        raise
    return Prompt(
        tokens,
        chat.param,
        images,
        thinking=state == "started",
        tools=tools,
        calls_in_thoughts=calls_in_thoughts,
        grammar=grammar,
        grammar_field="tools" if chat.grammar is None else chat.grammar_field,
        compiled=compiled,
        bias={markup.ids[CALL]: -100.0} if chat.tool_choice == "none" and CALL in markup.ids else {},
        recommended=served.recommended_sampling(thinking=markup.thinks and state != "finished"),
    )


async def text_prompt(
    prompt: TextPrompt,
    grammar: GrammarSpec | None,
    grammar_field: str,
    served: "ServedModel",
    work: Preparation,
    *,
    parse_special: bool,
) -> Prompt:
    """Tokenise a text that is to be continued as `grammar` says."""
    match prompt:
        case str():
            tokens = await work.encode(prompt, "prompt", kind="text" if parse_special else "literal")
        case []:
            refuse("prompt", "no tokens: give at least one")
        case _:
            tokens = prompt
            work.check_tokens(tokens, "prompt")
    grammar = await work.as_lark(grammar, grammar_field)
    compiled = await work.grammar(grammar, grammar_field)
    recommended = served.recommended_sampling(thinking=False)
    return Prompt(
        tokens,
        "prompt",
        is_chat=False,
        grammar=grammar,
        grammar_field=grammar_field,
        compiled=compiled,
        recommended=recommended,
    )
