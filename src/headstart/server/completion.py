"""The shapes of OpenAI's answers, whole and in chunks. Only what is set is sent."""

from typing import Any, Literal

from pydantic import BaseModel

from ..engine import Origin
from .transcript import Transcript

Kind = Literal["chat.completion", "chat.completion.chunk", "text_completion"]


class PromptDetails(BaseModel):
    cached_tokens: int


class CompletionDetails(BaseModel):
    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails

    @classmethod
    def of(cls, transcripts: list[Transcript]) -> "Usage":
        """Of all answers to a prompt, which was read once."""
        stats = [each.stats for each in transcripts if each.stats is not None]
        prompt, said = stats[0].prompt_tokens, sum(each.generation_tokens for each in stats)
        accepted = sum(each.accepted_draft_tokens for each in stats)
        return cls(
            prompt_tokens=prompt,
            completion_tokens=said,
            total_tokens=prompt + said,
            prompt_tokens_details=PromptDetails(cached_tokens=stats[0].prefix_cache_hit),
            completion_tokens_details=CompletionDetails(
                reasoning_tokens=sum(each.reasoning_tokens for each in transcripts),
                accepted_prediction_tokens=accepted,
                rejected_prediction_tokens=sum(each.proposed_draft_tokens for each in stats) - accepted,
            ),
        )


class FunctionCall(BaseModel):
    name: str = ""
    arguments: str = ""


class ToolCall(BaseModel):
    """A call, or what a chunk adds to it. Only chunks number them."""

    index: int = 0
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class Said(BaseModel):
    """A message, or what a chunk adds to it."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = []


class Choice(BaseModel):
    """Of a chat it has a message or a delta, of a completion a text."""

    index: int = 0
    message: Said | None = None
    delta: Said | None = None
    text: str | None = None
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    origins: list[Origin] | None = None


class Completion(BaseModel):
    """A whole answer or a chunk of one."""

    id: str
    object: Kind
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    generation_stats: dict[str, Any] | None = None
