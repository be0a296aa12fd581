"""What Anthropic's clients ask for, and how it becomes a request of the engine's.

As on the other routes a field may be null, one that is not here is ignored and named in the answer's stats, and one
that is known but cannot be honoured is refused by its name.
"""

import re
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from ..engine import Request
from ..sampling import SamplingParams
from ..sampling_params import MAX_STOP_CHARACTERS, MAX_STOPS
from .anthropic_blocks import Cached, Message, TextBlock
from .chat import Chat, shape_of
from .drafts import Drafts, depth
from .errors import refuse
from .openai import EFFORTS, OPENAI_PENALTIES
from .prepare import Preparation
from .prompt import Prompt
from .served_model import ServedModel
from .shape import Json, Listed, Shape, Text, Tools

# Claude Code begins its system prompt with a line for Anthropic's accounts that is never the same twice, and so no
# prompt would be found in the prefix cache. It says nothing to a model, and is left out.
BILLING_LINE = re.compile(r"\Ax-anthropic-billing[^\n]*\n?")

StopSequence = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
TOOL_CHOICES = {"auto": "auto", "any": "required", "tool": "auto", "none": "none"}


class Tool(Cached):
    type: Text | None = None
    name: Annotated[Text, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
    description: Text | None = None
    input_schema: Json | None = Field(None, description="Needed, but for tools that run at Anthropic.")

    def check(self, place: str) -> None:
        if self.type not in (None, "custom"):
            refuse(place, f"{self.type}: only tools that the client runs can be called: leave it out", "unsupported")
        if self.input_schema is None:
            refuse(f"{place}.input_schema", "Field required")

    def for_template(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


class ToolChoice(Shape):
    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = Field(default=None, description="Of the tool that must be called.")
    disable_parallel_tool_use: bool | None = Field(default=None, description="One call, where one must come.")


class ThinkingConfig(Shape):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=0)] | None = None


class OutputFormat(Shape):
    type: Literal["json_schema"]
    schema_: Json | bool = Field(alias="schema")


class OutputConfig(Shape):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountRequest(Cached):
    """A prompt, to be counted or answered."""

    model: Text | None = Field(None, description="By its id, folder or hub id; left out, the one that is served.")
    messages: Listed[Message] = Field(min_length=1)
    system: Text | Listed[TextBlock] | None = None
    tools: Tools[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None

    def check(self) -> None:
        for i, message in enumerate(self.messages):
            message.check(f"messages[{i}]")
        if self.messages[-1].role == "assistant":
            way_out = "end with a message of the user's"
            refuse(
                "messages", f"the last one is the assistant's, and cannot be gone on with: {way_out}", "unsupported"
            )
        for i, tool in enumerate(self.tools or ()):
            tool.check(f"tools[{i}]")
        if self.tool_choice is not None and (self.tool_choice.type == "tool") == (self.tool_choice.name is None):
            refuse("tool_choice.name", "goes with the type 'tool', and only with that")

    async def read(self, served: ServedModel, work: Preparation) -> Prompt:
        return await served.read_chat(partial(self._chat, served), work)

    def _chat(self, served: ServedModel) -> Chat:
        choice, output = self.tool_choice or ToolChoice(type="auto"), self.output_config or OutputConfig()
        return Chat(
            self._for_template(),
            [tool.for_template() for tool in self.tools or ()],
            schema_field="input_schema",
            tool_choice=TOOL_CHOICES[choice.type],
            tool=choice.name,
            several=not choice.disable_parallel_tool_use,
            thinking=self._thinks(served),
            thinking_field="thinking",
            budget=self._budget(output),
            grammar=shape_of(output.format.schema_, "output_config.format") if output.format else None,
            grammar_field="output_config.format",
        )

    def ignored(self) -> list[str]:
        """And what was read otherwise than it was sent."""
        found = set(self.unknown())
        if any(BILLING_LINE.match(text) for text in self._system_texts()):
            found.add("system: x-anthropic-billing")
        if any(block.type == "redacted_thinking" for message in self.messages for block in message.blocks):
            found.add("messages[].content[]: redacted_thinking")
        choice, shaped = self.tool_choice, self.output_config is not None and self.output_config.format is not None
        if choice is not None and choice.disable_parallel_tool_use and choice.type == "auto" and not shaped:
            found.add("tool_choice.disable_parallel_tool_use")  # nothing keeps a model from calling twice
        return sorted(found)

    def _system_texts(self) -> list[str]:
        system = self.system or ""
        return [system] if isinstance(system, str) else [block.text for block in system]

    def _for_template(self) -> list[dict[str, Any]]:
        system = "".join(BILLING_LINE.sub("", text) for text in self._system_texts())
        first = [{"role": "system", "content": system}] if system else []
        return [*first, *(each for message in self.messages for each in message.for_template())]

    def _thinks(self, served: ServedModel) -> bool | None:
        match self.thinking:
            case ThinkingConfig(type="enabled"):
                return True
            case ThinkingConfig(type="disabled"):
                return False
            case ThinkingConfig(type="adaptive") if served.dialect.thinks:  # where it sees fit: others never do
                return True
        return None

    def _budget(self, output: OutputConfig) -> int | None:
        """What was asked for in tokens, or by the effort."""
        if self.thinking is not None and self.thinking.budget_tokens is not None:
            return self.thinking.budget_tokens
        return EFFORTS.get(output.effort or "high")


class MessagesRequest(CountRequest):
    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    stop_sequences: Annotated[Listed[StopSequence], Field(max_length=MAX_STOPS)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = Field(None, description="Whose request it is: of no consequence here.")
    # Beyond Anthropic's.
    min_p: float | None = None
    min_tokens: int | None = None
    seed: int | None = None
    num_draft_tokens: Drafts = None
    acceptance: Literal["auto", "ratio", "coupled", "optimistic"] | None = None

    def request(self, prompt: Prompt, context: int) -> Request:
        """A RequestError names the field that is out of bounds."""
        names = {
            name: name for name in ("max_tokens", "temperature", "top_p", "top_k", "min_p", "min_tokens", "seed")
        }
        names |= {"stop_sequences": "stop", "acceptance": "accept"}
        asked = {theirs: value for ours, theirs in names.items() if (value := getattr(self, ours)) is not None}
        fields = {**prompt.sampling, **asked, "logit_bias": prompt.bias, "grammar": prompt.grammar}
        fields |= OPENAI_PENALTIES  # the makers' recommended penalties mean these
        fields["k"] = depth(self.num_draft_tokens)
        return Request(prompt.tokens, SamplingParams(**fields))
