"""From a conversation or a text to the tokens and the grammar that the engine gets."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..sampling import GrammarSpec
from ..sampling.grammar import Grammar
from .chat import Chat
from .errors import Refusal, refuse
from .markup import CALL, OutputParser, Tools, thinking_state, with_thinking
from .prepare import Preparation, TooHard
from .served_model import ServedModel

TextPrompt = str | list[int] | list[str] | list[list[int]]  # text or token ids, alone or in a list


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    param: str  # the field that it came in
    text: str | None = None  # as sent, if it is not a chat: then all output is text
    thinking: bool = False  # it ends in an open `<think>`
    tools: Tools = field(default_factory=dict)  # that may be called
    calls_in_thoughts: bool = True
    grammar: GrammarSpec | None = None
    compiled: Grammar | None = None  # held so that the engine finds it in the cache of compiled grammars
    bias: Mapping[int, float] = field(default_factory=dict)  # against tool calls where none may come
    recommended: Mapping[str, Any] = field(default_factory=dict)  # sampling parameters, used where none are given
    ignored: tuple[str, ...] = ()  # what was not used as sent

    def output_parser(self) -> OutputParser | None:
        """Return a parser for one output; None if all of it is text."""
        if self.text is not None:
            return None
        return OutputParser(self.tools, thinking=self.thinking, calls_in_thoughts=self.calls_in_thoughts)


async def chat_prompt(make_chat: Callable[[], Chat], served: ServedModel, work: Preparation) -> Prompt:
    """Render, tokenise and check a conversation."""
    markup = served.template.markup
    rendered = await work.run(_render, make_chat, served, work)
    chat, tokens = rendered.chat, rendered.tokens
    if tokens is None:
        tokens = await work.encode(rendered.text, "messages", kind="chat", mark=rendered.mark)
    state = thinking_state(tokens, served.tokenizer)
    # Each layer is compiled on its own first, so that a refusal names the field at fault.
    await work.grammar(chat.grammar, chat.grammar_field)
    answer = await work.run(chat.grammar_after_reasoning, markup) if chat.tools else chat.grammar
    await _compile_answer(answer, chat, served, work)
    # If a grammar requires the call after the reasoning, one inside it would be one too many.
    calls_in_thoughts = answer is None or not chat.callable_tools
    grammar = with_thinking(answer, markup, state, budget=chat.budget, calls=calls_in_thoughts)
    if chat.budget is not None:
        combined_field = chat.budget_field
    else:  # the answer is too large with the reasoning before it
        combined_field = chat.grammar_field if chat.grammar is not None else "tools"
    return Prompt(
        tokens,
        "messages",
        thinking=state == "started",
        tools=chat.callable_tools,
        calls_in_thoughts=calls_in_thoughts,
        grammar=grammar,
        compiled=await work.grammar(grammar, combined_field),
        bias={markup.ids[CALL]: -100.0} if chat.tool_choice == "none" and CALL in markup.ids else {},
        recommended=served.recommended_sampling(thinking=markup.thinks and state != "finished"),
        ignored=("messages[].role: system",) if rendered.role_changed else (),
    )


class Rendered(NamedTuple):
    chat: Chat
    text: str
    mark: str  # in the text: see encode.py
    role_changed: bool  # of a late system message
    tokens: list[int] | None  # None: the text is too long to be tokenised in a thread


def _render(make_chat: Callable[[], Chat], served: ServedModel, work: Preparation) -> Rendered:
    """Check a chat and render it. All in one thread, for which clients wait their turn once."""
    chat = make_chat()
    work.check_characters(sum(len(message["content"]) for message in chat.messages), "messages")
    chat.check(served.template.markup)
    (text, mark), role_changed = served.template.render(chat, work.preparer.encoder)
    tokens = work.encode_here(text, "messages", "chat", mark) if work.is_small(text) else None
    return Rendered(chat, text, mark, role_changed, tokens)


async def _compile_answer(answer: GrammarSpec | None, chat: Chat, served: ServedModel, work: Preparation) -> None:
    """Compile the grammar of the answer; if that fails, find the tool whose schema is the reason."""
    try:
        await work.grammar(answer, "tools")
    except Refusal as refused:
        if isinstance(refused.__cause__, TooHard):
            raise  # too hard: trying each tool as well could take seconds each, so blame the list
        for grammar, field in chat.grammars_by_tool(served.template.markup):
            await work.grammar(grammar, field)
        raise


async def text_prompt(
    prompt: TextPrompt,
    grammar: GrammarSpec | None,
    grammar_field: str,
    served: ServedModel,
    work: Preparation,
    *,
    parse_special: bool,
) -> Prompt:
    """Tokenise a text that is to be continued as `grammar` says."""
    match prompt:
        case str(text) | [str(text)]:
            tokens = await work.encode(text, "prompt", kind="text" if parse_special else "literal")
        case [[*ids]] | ([int(), *_] as ids):
            tokens = [token for token in ids if isinstance(token, int)]
            work.check_tokens(tokens, "prompt")
            known = [token for token in tokens if token in range(served.model.vocabulary)]
            text = str(await work.run(served.tokenizer.decode, known))
        case [_, *_]:
            refuse("prompt", "only one prompt per request is supported: send the others separately", "unsupported")
        case _:
            refuse("prompt", "no tokens: give at least one")
    compiled = await work.grammar(grammar, grammar_field)
    recommended = served.recommended_sampling(thinking=False)
    return Prompt(tokens, "prompt", text=text, grammar=grammar, compiled=compiled, recommended=recommended)
