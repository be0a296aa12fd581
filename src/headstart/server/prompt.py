"""From a chat or a text to the tokens and the grammar that the engine gets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..engine import PromptImage, insert_images
from ..errors import RequestError
from ..sampling import GrammarSpec
from ..sampling.grammar import Grammar
from .chat import Chat
from .errors import Refusal, refuse
from .images import ImagePart, check_images_allowed, count_characters, read_images, take_images
from .loaded_model import LoadedModel
from .markup import OutputParser, Tools, call_grammar, thinking_state, with_thinking
from .prepare import Preparation

TextPrompt = str | list[int]  # text or token ids


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


async def chat_prompt(make_chat: Callable[[], Chat], served: LoadedModel, work: Preparation) -> Prompt:
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
        bias={markup.ids[markup.call]: -100.0} if chat.tool_choice == "none" and markup.call in markup.ids else {},
        recommended=served.sampling.params(thinking=markup.thinks and state != "finished"),
    )


async def text_prompt(
    prompt: TextPrompt,
    grammar: GrammarSpec | None,
    grammar_field: str,
    served: LoadedModel,
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
    recommended = served.sampling.params(thinking=False)
    return Prompt(
        tokens,
        "prompt",
        is_chat=False,
        grammar=grammar,
        grammar_field=grammar_field,
        compiled=compiled,
        recommended=recommended,
    )
