"""Responses of /v1/responses, whole or as a stream of typed events."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .errors import to_refusal
from .markup import Delta
from .response import Events, ResponseWriter, TokenSpan, encode_json, in_pieces, new_id
from .responses_items import seal
from .responses_request import ENCRYPTED_CONTENT, ReasoningConfig, ResponsesRequest, TextConfig

STATUSES = {"length": "incomplete", "cancelled": "cancelled"}  # by finish reason

Json = dict[str, Any]
Save = Callable[[str, str, list[Json]], Awaitable[None]]  # (id, response, its output)


@dataclass
class ResponsesWriter(ResponseWriter[ResponsesRequest]):
    save: Save | None = None  # keeps a response that has ended

    def __post_init__(self) -> None:
        self._begin("resp_")
        body, (self._output,) = self.body, self.outputs
        self._request = self._of_request(body)
        summarised = body.reasoning is not None and body.reasoning.summary is not None
        self._generates = body.generate is not False
        self._items = ItemStream(body.call_name, summarised, sealed=ENCRYPTED_CONTENT in (body.include or ()))

    async def complete(self, events: Events) -> str:
        async for _ in self._events(events):
            pass
        return await self._end()

    async def stream(self, events: Events) -> AsyncIterator[str]:
        async for kind, start, response in self.messages(events):
            for piece in in_pieces(f"event: {kind}\ndata: {start}", response, "}\n\n"):
                yield piece
                if response:
                    await asyncio.sleep(0)

    async def messages(self, events: Events) -> AsyncIterator[tuple[str, str, str]]:
        """Yield the type of each event and its JSON without the bracket at the end, in two pieces."""
        number = 0
        async for event in self._all_events(events):
            response = event.pop("response", "")
            data = encode_json({**event, "sequence_number": number})
            yield event["type"], data[:-1] + (',"response":' if response else ""), response
            number += 1

    async def _all_events(self, events: Events) -> AsyncIterator[Json]:
        try:
            yield {"type": "response.created", "response": self._response("in_progress")}
            yield self._in_progress()
            async for event in self._events(events):
                yield event
            response = await self._end()
            kind = "completed" if self._status() == "completed" else "incomplete"
            timings = self.timings(self._output.stats)
            yield {"type": f"response.{kind}", "response": response, "timings": timings}
        except Exception as error:  # the status has been sent
            refusal = to_refusal(error)
            details = {"code": refusal.code or "server_error", "message": refusal.detail}
            yield {"type": "response.failed", "response": self._response("failed", error=details)}

    def _in_progress(self, **fields: Any) -> Json:
        return {"type": "response.in_progress", "response": self._response("in_progress"), **fields}

    async def _events(self, events: Events) -> AsyncIterator[Json]:
        """Yield the events of the output's items."""
        async for event in events:
            for progress in self.prompt_progress(event):
                yield self._in_progress(prompt_progress=progress)
            for delta in TokenSpan.join(self._output.read(event)).deltas if self._generates else ():
                for each in self._items.add(delta):
                    is_text = each["type"].endswith(".delta")
                    yield each | self.timings_per_token(self._output) if is_text else each
        for each in self._items.close("incomplete" if self._status() != "completed" else "completed"):
            yield each

    def _status(self) -> str:
        if not self._generates:
            return "completed"
        return STATUSES.get(self._output.finish_reason or "", "completed")

    async def _end(self) -> str:
        """Return the whole response, and keep it for later requests."""
        status = self._status()
        details = {"incomplete_details": {"reason": "max_output_tokens"}} if status == "incomplete" else {}
        stats = self.generation_stats(self._output.stats)
        ended = {"completed_at": int(time.time())} if status == "completed" else {}
        response = self._response(status, **details, **ended, usage=self._usage(), generation_stats=stats)
        if self.save is not None:
            await self.save(self.id, response, self._items.items)
        return response

    def _response(self, status: str, **fields: Any) -> str:
        response = {
            "id": self.id,
            "object": "response",
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "output": self._items.items,
            "usage": None,
        }
        return f"{encode_json(response | fields)[:-1]},{self._request}"

    def _of_request(self, body: ResponsesRequest) -> str:
        """Return the end of every response, which says what was requested: it can be long, and is written once."""
        sampling = {"temperature": 0.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        sampling |= {name: value for name in sampling if (value := self.prompt.recommended.get(name)) is not None}
        requested: Json = {
            **sampling,
            "background": False,
            "created_at": int(time.time()),
            "instructions": None,
            "max_output_tokens": None,
            "max_tool_calls": None,
            "metadata": {},
            "model": self.model_id,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "prompt_cache_key": None,
            "safety_identifier": None,
            "service_tier": "default",
            "store": True,
            "top_logprobs": 0,
            "truncation": "disabled",
            "tool_choice": "auto",
        }
        echoed = requested.keys() - {"model", "service_tier"} & set(type(body).model_fields)
        given = body.model_dump(include=echoed, by_alias=True, exclude_none=True)
        reasoning, text = body.reasoning or ReasoningConfig(), body.text or TextConfig()
        nested = {
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
            "text": text.model_dump(exclude={"format"}, exclude_none=True) | {"format": text.to_json()},
            "tools": [tool.model_dump() for tool in body.tools or ()],
        }
        return encode_json(requested | given | nested)[1:]

    def _usage(self) -> Json:
        stats = self._output.stats
        return {
            "input_tokens": stats.prompt_tokens,
            "input_tokens_details": {"cached_tokens": stats.prefix_cache_hit, "cache_write_tokens": 0},
            "output_tokens": stats.generation_tokens,
            "output_tokens_details": {"reasoning_tokens": self._output.reasoning_tokens},
            "total_tokens": stats.prompt_tokens + stats.generation_tokens,
        }


class ItemStream:
    """The output items so far, and the events that add to them: one item, with one part, after another."""

    def __init__(self, call_name: Callable[[str], Json], summarised: bool, sealed: bool):
        """Start without items.

        Args:
            call_name: Returns the fields that name a function in a call.
            summarised: Send reasoning as its summary.
            sealed: Also send it in a form that clients send back without looking inside.
        """
        self.items: list[Json] = []
        self._call_name = call_name
        self._summarised, self._sealed = summarised, sealed
        self._open: str | None = None  # the kind of delta that the last item takes
        self._texts: list[str] = []  # of the last item

    def add(self, delta: Delta) -> Iterator[Json]:
        if delta.kind == "tool_call" or delta.kind != self._open:
            yield from self.close()
            yield from self._begin(delta)
        if delta.kind != "tool_call" and delta.text:
            self._texts.append(delta.text)
            yield self._event("delta", delta=delta.text)

    def close(self, status: str = "completed") -> Iterator[Json]:
        """End the open item."""
        if self._open is None:
            return
        item, text = self.items[-1], "".join(self._texts)
        if self._open == "arguments":
            item |= {"arguments": text, "status": status}
            yield self._event("done", arguments=text, name=item["name"])
        else:
            part = self._part(text)
            yield self._event("done", text=text)
            yield self._part_event("done", part)
            item |= {self._parts: [part], "status": status}
            if self._open == "reasoning" and self._sealed:
                item["encrypted_content"] = seal(text)
        yield self._item_event("done")
        self._open, self._texts = None, []

    def _begin(self, delta: Delta) -> Iterator[Json]:
        match delta.kind:
            case "content":
                item: Json = {"type": "message", "id": new_id("msg_"), "role": "assistant", "content": []}
            case "reasoning":
                item = {"type": "reasoning", "id": new_id("rs_"), "summary": []}
                item |= {} if self._summarised else {"content": []}
            case _:
                item = {"type": "function_call", "id": new_id("fc_"), "call_id": new_id("call_")}
                item |= {**self._call_name(delta.text), "arguments": ""}
        self._open = "arguments" if delta.kind == "tool_call" else delta.kind
        self.items.append(item | {"status": "in_progress"})
        yield self._item_event("added")
        if self._open != "arguments":
            yield self._part_event("added", self._part(""))

    @property
    def _parts(self) -> str:
        """Return the field of the open item that its part is in."""
        return "summary" if self._open == "reasoning" and self._summarised else "content"

    def _part(self, text: str) -> Json:
        if self._open == "content":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {"type": "summary_text" if self._summarised else "reasoning_text", "text": text}

    def _item_event(self, what: str) -> Json:
        kind = f"response.output_item.{what}"
        return {"type": kind, "output_index": len(self.items) - 1, "item": dict(self.items[-1])}

    def _part_event(self, what: str, part: Json) -> Json:
        kind = "reasoning_summary_part" if self._parts == "summary" else "content_part"
        return {"type": f"response.{kind}.{what}", **self._place(), "part": part}

    def _event(self, what: str, **fields: Any) -> Json:
        """Return an event of the open item's text."""
        kinds = {"content": "output_text", "arguments": "function_call_arguments", "reasoning": "reasoning_text"}
        kind = "reasoning_summary_text" if self._parts == "summary" else kinds[self._open or ""]
        logprobs: Json = {"logprobs": []} if self._open == "content" else {}
        return {"type": f"response.{kind}.{what}", **self._place(), **fields, **logprobs}

    def _place(self) -> Json:
        place: Json = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        if self._open == "arguments":
            return place
        return place | {f"{self._parts}_index": 0}
