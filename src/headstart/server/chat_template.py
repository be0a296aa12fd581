"""Render conversations with the chat template of a model."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from inspect import signature
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .chat import Chat
from .encode import Encoder, MarkedText, splits_thoughts
from .errors import refuse
from .markup import CallFormat

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    def __init__(self, tokenizer: TokenizerWrapper):
        self._tokenizer = tokenizer

    @cached_property
    def call_format(self) -> CallFormat:
        return CallFormat.of(self._tokenizer)

    def render(self, chat: Chat, encoder: Encoder) -> tuple[MarkedText, bool]:
        """Return the text of a prompt, and whether a system message had to become a user message."""
        self._check(chat)
        messages, reworded = chat.messages, False
        if any(map(_is_system, messages[1:])) and not self._takes_system_messages_anywhere:
            messages, reworded = _with_one_system_message(messages)
        # None lets the template's own default hold, where mlx-lm would set True.
        options = {"enable_thinking": chat.thinking, **chat.template_options}
        conversation = (messages, chat.tools if chat.callable_tools else None, options)
        try:
            text = encoder.render(self._apply, conversation, splits_thoughts=self._splits_thoughts)
        except (TemplateError, TypeError, ValueError) as error:  # whatever a template does with its input
            refuse("messages", f"the model's chat template rejects them: {error}")
        return text, reworded

    def _check(self, chat: Chat) -> None:
        if not self._tokenizer.has_chat_template:
            refuse("messages", "the model has no chat template: use /v1/completions", "unsupported")
        arguments = signature(self._tokenizer._tokenizer.apply_chat_template).parameters
        if reserved := sorted(arguments.keys() & chat.template_options.keys()):
            refuse("chat_template_kwargs", f"{', '.join(reserved)} cannot be set by clients: leave it out")

    def _apply(self, messages: Messages, tools: Messages | None, options: Mapping[str, Any]) -> str:
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
        """Whether the template writes system messages where they are. Some reject or drop late ones."""
        word, roles = "perhaps", ("system", "user", "assistant", "system", "user")
        messages = [{"role": role, "content": word} for role in roles]
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False)).count(word) == len(roles)
        except TemplateError:
            return False


def _with_one_system_message(messages: Messages) -> tuple[Messages, bool]:
    """Join the system messages at the start and make late ones, which agents send, user messages.

    Late ones stay in place. Moved to the front they would change the prefix, and no prompt would be found in the
    prefix cache. Returns the messages, and whether there were late ones.
    """
    first = list(takewhile(_is_system, messages))
    joined = [{**first[0], "content": "\n\n".join(each["content"] for each in first)}] if first else []
    others = messages[len(first) :]
    reworded = [{**each, "role": "user"} if _is_system(each) else each for each in others]
    return [*joined, *reworded], any(map(_is_system, others))


def _is_system(message: Mapping[str, Any]) -> bool:
    return bool(message["role"] == "system")
