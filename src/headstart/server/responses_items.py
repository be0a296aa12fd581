"""The items of a conversation in /v1/responses, and the messages that templates take in their place."""

import json
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter
from pydantic_core import PydanticCustomError

from .images import EncodedImage, ImagePart, parse_image_url, template_content
from .openai_request import FunctionCall
from .request_fields import BoundedList, RequestModel, Text, reject_media_part

NO_EFFECT = ("annotations", "logprobs")  # fields that hold what the client likes
ASSISTANT_TEXTS = ("content", "reasoning_content")
SEALED = "headstart:"  # begins text that this server has written as `encrypted_content`
SUMMARY = "This is a summary of the conversation so far. Continue from it.\n\n"

Messages = list[dict[str, Any]]


def seal(text: str) -> str:
    """Return text as clients keep it without looking inside. It is encoded and not encrypted: it is theirs."""
    return SEALED + b64encode(text.encode()).decode()


def open_sealed(sealed: str) -> str:
    """Return sealed text; nothing if another server has sealed it."""
    before, mark, encoded = sealed.partition(SEALED)
    try:
        return b64decode(encoded, validate=True).decode() if mark and not before else ""
    except ValueError:
        return ""


class ResponsesTextPart(RequestModel):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: Text
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputImage(RequestModel, ImagePart):
    type: Literal["input_image"]
    image_url: Text | None = None
    file_id: Text | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None

    def encoded(self) -> EncodedImage:
        if self.image_url is None:
            raise ValueError("has no image_url, and files are not supported: send a data URL")
        return parse_image_url(self.image_url, low=self.detail == "low")


Parts = (
    Text
    | BoundedList[
        Annotated[ResponsesTextPart | InputImage, Field(discriminator="type"), BeforeValidator(reject_media_part)]
    ]
)


class Item(RequestModel):
    """A part of the conversation."""

    type: str
    id: Text | None = None
    status: Text | None = None

    def add_to(self, messages: Messages) -> None:
        """Add the item to the messages that a template takes; the texts of an assistant's are lists as yet."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Return the item as clients may send it again, without the fields that have no effect."""
        return dict(_to_json(self))


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts
    phase: Text | None = None

    def add_to(self, messages: Messages) -> None:
        if self.role == "assistant":
            _assistant(messages)["content"].append(_text(self.content))
        else:
            role = "user" if self.role == "user" else "system"
            messages.append({"role": role, "content": template_content(self.content)})


class ReasoningItem(Item):
    type: Literal["reasoning"]
    summary: BoundedList[ResponsesTextPart] | None = None
    content: BoundedList[ResponsesTextPart] | None = None
    encrypted_content: Text | None = None

    def add_to(self, messages: Messages) -> None:
        text = _text(self.content or []) or open_sealed(self.encrypted_content or "") or _text(self.summary or [])
        if not text:
            return
        last = messages[-1] if messages else {}
        message = _assistant(messages, new=any(last.get("content", ())) or "tool_calls" in last)
        message.setdefault("reasoning_content", []).append(text)


class FunctionCallItem(Item, FunctionCall):
    type: Literal["function_call"]
    call_id: Text
    namespace: Text | None = None

    def add_to(self, messages: Messages) -> None:
        function = {"name": full_name(self.name, self.namespace), "arguments": self.arguments}
        call = {"type": "function", "id": self.call_id, "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)

    def to_json(self) -> dict[str, Any]:
        arguments = self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments)
        return {**super().to_json(), "arguments": arguments}


class FunctionCallOutputItem(Item):
    type: Literal["function_call_output"]
    call_id: Text
    output: Parts

    def add_to(self, messages: Messages) -> None:
        messages.append({"role": "tool", "tool_call_id": self.call_id, "content": template_content(self.output)})


class CompactionItem(Item):
    """A summary that takes the place of a part of the conversation: see compaction.py."""

    type: Literal["compaction", "compaction_summary"]
    encrypted_content: Text

    def add_to(self, messages: Messages) -> None:
        if text := open_sealed(self.encrypted_content):
            messages.append({"role": "user", "content": SUMMARY + text})


ITEM_TYPES = ("message", "reasoning", "function_call", "function_call_output", "compaction")


def _item_type(item: Any) -> Any:
    if not isinstance(item, dict):
        return getattr(item, "type", None)
    kind = item.get("type", "message" if "role" in item else None)
    return "compaction" if kind == "compaction_summary" else kind


def _reject_unknown(item: Any) -> Any:
    if (kind := _item_type(item)) not in ITEM_TYPES:
        raise PydanticCustomError(
            "unsupported",
            "items of the type {kind} are not supported by this server: send {known}",
            {"kind": repr(kind)[:100], "known": ", ".join(ITEM_TYPES)},
        )
    return item


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[CompactionItem, Tag("compaction")],
    Discriminator(_item_type),
    BeforeValidator(_reject_unknown),
]
ITEMS = TypeAdapter(list[InputItem])


def _to_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_to_json(each) for each in value]
    if not isinstance(value, RequestModel):
        return value
    known = [name for name in type(value).model_fields if name not in NO_EFFECT and getattr(value, name) is not None]
    return {name: _to_json(getattr(value, name)) for name in known}


def to_messages(items: Sequence[Item]) -> Messages:
    """Return the messages that a template takes."""
    messages: Messages = []
    for item in items:
        item.add_to(messages)
    for message in messages:
        if message["role"] == "assistant":
            message.update({name: "".join(message[name]) for name in ASSISTANT_TEXTS if name in message})
    return messages


def _assistant(messages: Messages, *, new: bool = False) -> dict[str, Any]:
    """Return the assistant's message at the end: the items of a turn are one message to templates."""
    if new or not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": []})
    return messages[-1]


def full_name(name: str, namespace: str | None) -> str:
    """Return the name of a function as the model knows it."""
    return name if namespace is None else f"{namespace}.{name}"


def _text(parts: str | Sequence[ResponsesTextPart | InputImage]) -> str:
    if isinstance(parts, str):
        return parts
    return "".join(part.text for part in parts if isinstance(part, ResponsesTextPart))
