"""The one model that a server has: its names, what its card says, and how it reads a prompt."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..cards import Card
from ..checkpoint import Layout
from ..checkpoint.identity import hub_id
from ..kernels import selected
from ..models import Model
from ..sampling import GrammarSpec, token_bytes
from .chat import Chat
from .encode import Encoder, MarkedText, splits_thoughts
from .errors import Refusal
from .markup import CALL, Dialect, think_first, thought_in
from .prepare import Preparation, TooHard
from .prompt import Prompt
from .system import Messages, has_several, takes_several, with_one

PromptText = str | list[int] | list[str] | list[list[int]]  # as such or in tokens, in a list or not


@dataclass(frozen=True)
class ServedModel:
    id: str
    model: Model
    tokenizer: TokenizerWrapper
    path: Path
    family: str
    quantization: dict[str, Any] | None
    card: Card | None
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, layout: Layout, model: Model, tokenizer: TokenizerWrapper, *, id: str | None = None) -> "ServedModel":
        path = layout.path.absolute()
        name = id or hub_id(path) or path.name
        if model.head_unavailable and layout.path.is_absolute():  # clients may be anywhere: not the folder for them
            model = replace(model, head_unavailable=model.head_unavailable.replace(str(layout.path), name))
        return cls(name, model, tokenizer, path, layout.family, layout.quantization, layout.card)

    def answers_to(self, name: str) -> bool:
        card = self.card.hub_id if self.card else None
        return name in (self.id, self.path.name, hub_id(self.path), card) or Path(name) == self.path

    def check_name(self, name: str | None) -> None:
        if name is not None and not self.answers_to(name):
            message = f"model {name[:100]!r} is not served here: this server has {self.id!r}"
            raise Refusal(404, message, param="model", code="model_not_found")

    def describe(self) -> dict[str, Any]:
        """An entry of /v1/models."""
        return {
            "id": self.id,
            "object": "model",
            "created": self.created,
            "owned_by": "headstart",
            "context_length": self.model.context_length,
            "family": self.family,
            "quantization": self.quantization,
            "kernels": selected(),
            "capabilities": list(self.card.capabilities) if self.card else ["text"],
            "native_mtp": {
                "available": self.model.has_head,
                "default_k": self.model.default_k,
                "max_k": self.model.max_k,
                "reason": self.model.head_unavailable,
            },
            "sampling_defaults": {
                "thinking": self.sampling(thinking=True),
                "not_thinking": self.sampling(thinking=False),
            },
        }

    @cached_property
    def dialect(self) -> Dialect:
        return Dialect.of(self.tokenizer)

    def sampling(self, *, thinking: bool) -> dict[str, Any]:
        """What the makers recommend, as fields of SamplingParams; nothing where they say nothing."""
        if self.card is None:
            return {}
        defaults = self.card.sampling_defaults
        first, second = defaults.thinking, defaults.not_thinking
        chosen = (first or second) if thinking else (second or first)
        return chosen.model_dump(exclude_none=True) if chosen else {}

    async def read_chat(self, make: Callable[[], Chat], work: Preparation) -> Prompt:
        """The tokens of a conversation, and what may be said to it."""
        dialect = self.dialect
        chat, (text, mark), reworded, tokens = await work.run(self._render, make, work)
        if tokens is None:
            tokens = await work.encode(text, "messages", kind="chat", mark=mark)
        thought = thought_in(tokens, self.tokenizer)
        await work.grammar(chat.grammar, chat.grammar_field)
        answer = await work.run(chat.answer_grammar, dialect) if chat.tools else chat.grammar
        await self._check_calls(answer, chat, work)
        # Where a grammar has calls come after the thought, one inside it would be one too many.
        calls_in_thoughts = answer is None or not chat.callable
        grammar = think_first(answer, dialect, thought, budget=chat.budget, calls=calls_in_thoughts)
        compiled = await work.grammar(grammar, "thinking_budget")
        no_calls = chat.tool_choice == "none" and CALL in dialect.ids
        return Prompt(
            tokens,
            "messages",
            thinking=thought == "begun",
            tools=chat.callable,
            calls_in_thoughts=calls_in_thoughts,
            grammar=grammar,
            compiled=compiled,
            bias={dialect.ids[CALL]: -100.0} if no_calls else {},
            sampling=self.sampling(thinking=dialect.thinks and thought != "over"),
            ignored=("messages[].role: system",) if reworded else (),
        )

    async def read_text(
        self, prompt: PromptText, grammar: GrammarSpec | None, field: str, work: Preparation, *, parse_special: bool
    ) -> Prompt:
        """The tokens of a text that is to go on, as `grammar` says, which came in `field`."""
        tokens, text = await self._tokens(prompt, work, parse_special=parse_special)
        compiled = await work.grammar(grammar, field)
        sampling = self.sampling(thinking=False)
        return Prompt(tokens, "prompt", text=text, grammar=grammar, compiled=compiled, sampling=sampling)

    def spell(self, token: int) -> bytes:
        return token_bytes(token, self.tokenizer)

    async def _check_calls(self, answer: GrammarSpec | None, chat: Chat, work: Preparation) -> None:
        """Compile the grammar of calls, and find the tool whose schema cannot be kept to."""
        try:
            await work.grammar(answer, "tools")
        except Refusal as refused:
            if isinstance(refused.__cause__, TooHard):  # all together: no one of them is to blame
                raise
            for grammar, field in chat.call_grammars(self.dialect):
                await work.grammar(grammar, field)
            raise

    def _render(self, make: Callable[[], Chat], work: Preparation) -> tuple[Chat, MarkedText, bool, list[int] | None]:
        """Return a conversation, its text, whether a message had to be reworded, and its tokens if they are few."""
        chat = make()
        work.check_characters(sum(len(message["content"]) for message in chat.messages), "messages")
        chat.check(self.dialect)
        self._check_template(chat)
        messages, reworded = chat.messages, False
        if has_several(messages) and not self._takes_several_systems:
            messages, reworded = with_one(messages)
        text, mark = self._through_template(messages, chat, work.preparer.encoder)
        tokens = work.encode_here(text, "messages", "chat", mark) if work.is_small(text) else None
        return chat, (text, mark), reworded, tokens

    @cached_property
    def _takes_several_systems(self) -> bool:
        return takes_several(self.tokenizer)

    def _check_template(self, chat: Chat) -> None:
        if not self.tokenizer.has_chat_template:
            message = "messages: the model has no chat template: use /v1/completions"
            raise Refusal(400, message, param="messages", code="unsupported")
        arguments = signature(self.tokenizer._tokenizer.apply_chat_template).parameters
        if taken := sorted(arguments.keys() & chat.template.keys()):
            message = f"chat_template_kwargs: {', '.join(taken)}: not for clients to set: leave it out"
            raise Refusal(400, message, param="chat_template_kwargs", code="invalid_value")

    def _through_template(self, messages: Messages, chat: Chat, encoder: Encoder) -> MarkedText:
        # None is neither yes nor no, so that the template's own default holds. mlx-lm would say yes.
        options = {"enable_thinking": chat.thinking, **chat.template}
        conversation = (messages, chat.tools if chat.callable else None, options)
        try:
            return encoder.render(self._apply_template, conversation, splits_thoughts=self._splits_thoughts)
        except (TemplateError, TypeError, ValueError) as error:  # whatever a template makes of what it gets
            message = f"messages: the model's chat template refuses them: {error}"
            raise Refusal(400, message, param="messages", code="invalid_value") from error

    def _apply_template(self, messages: Messages, tools: Messages | None, options: Mapping[str, Any]) -> str:
        tools = list(tools) if tools is not None else None
        template = self.tokenizer.apply_chat_template
        return str(template(list(messages), tools=tools, add_generation_prompt=True, tokenize=False, **options))

    @cached_property
    def _splits_thoughts(self) -> bool:
        try:
            return splits_thoughts(self._apply_template)
        except TemplateError:
            return False

    async def _tokens(self, prompt: PromptText, work: Preparation, *, parse_special: bool) -> tuple[list[int], str]:
        """And the text."""
        match prompt:
            case str(text) | [str(text)]:
                return await work.encode(text, "prompt", kind="text" if parse_special else "literal"), text
            case [[*ids]] | ([int(), *_] as ids):
                tokens = [token for token in ids if isinstance(token, int)]
                work.check_tokens(tokens, "prompt")
                known = range(self.model.vocabulary)
                return tokens, str(
                    await work.run(self.tokenizer.decode, [token for token in tokens if token in known])
                )
            case [_, *_]:
                raise Refusal(400, "prompt: one at a time: send the others alone", param="prompt", code="unsupported")
        raise Refusal(400, "prompt is empty: give at least one token", param="prompt", code="invalid_value")
