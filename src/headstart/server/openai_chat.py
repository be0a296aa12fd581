"""The messages and tools of OpenAI's chats, and what chat templates know them as."""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import from_json

from .markup import loads, too_deep
from .shape import Json, Listed, Shape, Text


def _object(text: str) -> str:
    """Templates write arguments in their own way, and so must be able to look into them."""
    if not isinstance(arguments := _arguments(text), dict) or too_deep(arguments):
        raise ValueError("Arguments should be the text of a JSON object, or the beginning of one")
    return text


def _arguments(text: str) -> Any:
    """As far as they go: a stream has sent part of a call that its limit then cuts off, and clients send it back."""
    try:
        return loads(text or "{}")
    except ValueError:
        return _beginning(text)


def _beginning(text: str) -> Any:
    try:
        return from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return None


class TextPart(Shape):
    type: Literal["text"]
    text: Text


class CalledFunction(Shape):
    name: Text
    arguments: Annotated[Text, AfterValidator(_object)] = "{}"

    @property
    def cut_off(self) -> bool:
        try:
            json.loads(self.arguments or "{}")
        except ValueError:
            return True
        return False


class Called(Shape):
    id: Text | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": _arguments(self.function.arguments)}
        return {"type": "function", "id": self.id, "function": function}


class Message(Shape):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Listed[TextPart] | None = None
    reasoning_content: Text | None = Field(None, description="What the assistant thought; also as `reasoning`.")
    reasoning: Text | None = None
    tool_calls: Listed[Called] | None = None
    tool_call_id: Text | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates know it: they say system where OpenAI says developer, and want one text."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        told: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        thought = self.reasoning if self.reasoning_content is None else self.reasoning_content
        if thought is not None:
            told["reasoning_content"] = thought
        if self.tool_calls:
            told["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            told["tool_call_id"] = self.tool_call_id
        return told


class Function(Shape):
    name: Annotated[Text, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
    description: Text | None = None
    parameters: Json | None = None


class Tool(Shape):
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        function = {name: getattr(self.function, name) for name in Function.model_fields}
        return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


class FunctionName(Shape):
    name: Text


class NamedTool(Shape):
    type: Literal["function"]
    function: FunctionName
