"""Responses of /v1/chat/completions and /v1/completions, whole or as a stream of chunks."""

import time
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import accumulate
from typing import Any

from ..engine import Stats
from .markup import Delta
from .openai_request import ChatCompletionRequest, CompletionRequest
from .response import MIN_LOGPROB, ChoiceOutput, Events, OutputToken, ResponseWriter, TokenSpan, encode_json, new_id

Json = dict[str, Any]
TokenBytes = Callable[[int], bytes]


class OpenAIWriter(ResponseWriter[ChatCompletionRequest | CompletionRequest]):
    def __post_init__(self) -> None:
        body, self._created = self.body, int(time.time())
        self._is_chat = isinstance(body, ChatCompletionRequest)
        self._begin("chatcmpl-" if self._is_chat else "cmpl-")
        self._usage_in_stream = bool(body.stream_options and body.stream_options.include_usage)
        self._include_origins = bool(body.include_origins)

    async def complete(self, events: Events) -> str:
        async for event in events:
            choice = self.outputs[event.choice]
            choice.unsent += choice.read(event)
        choices = []
        for choice in self.outputs:
            span = TokenSpan.join(choice.unsent)
            if self._is_chat:
                output: Json = {"message": _message(span.deltas)}
            else:
                output = {"text": "".join(delta.text for delta in span.deltas)}
            choices.append(self._choice(choice, output, span, choice.finish_reason))
        return encode_json(self._envelope(choices, "", usage=self._usage(), **self._stats()))

    async def stream(self, events: Events) -> AsyncIterator[str]:
        async for chunk in self._chunks(events):
            yield f"data: {encode_json(chunk)}\n\n"
        yield "data: [DONE]\n\n"

    async def _chunks(self, events: Events) -> AsyncIterator[Json]:
        if self._is_chat:
            for choice in self.outputs:
                delta = {"role": "assistant", "content": None}
                yield self._envelope([{"index": choice.index, "delta": delta, "finish_reason": None}])
        unfinished = len(self.outputs)
        async for event in events:
            choice = self.outputs[event.choice]
            for progress in self.prompt_progress(event):
                yield self._progress(choice.index, progress)
            spans = choice.read(event)
            # A chunk per step, or with origins one per token, so that each text is beside its origin.
            for span in spans if self._include_origins else [TokenSpan.join(spans)]:
                for part in self._parts(choice, span):
                    yield self._envelope([part], **self.timings_per_token(choice))
            if event.finish_reason is None:
                continue
            unfinished -= 1
            is_last = not unfinished and not self._usage_in_stream
            text: Json = {"delta": {}} if self._is_chat else {"text": ""}
            last = self._choice(choice, text, TokenSpan.join(choice.unsent), choice.finish_reason)
            yield self._envelope([last], **(self._stats() if is_last else {}))
        if self._usage_in_stream:
            yield self._envelope([], usage=self._usage(), **self._stats())

    def _progress(self, index: int, progress: Json) -> Json:
        """Return the chunk that llama.cpp's server sends when more of a prompt is read, and when all of it is."""
        text: Json = {"delta": {}} if self._is_chat else {"text": ""}
        choice = {"index": index, **text, "logprobs": None, "finish_reason": None}
        return self._envelope([choice], prompt_progress=progress)

    def _parts(self, choice: ChoiceOutput, span: TokenSpan) -> Iterator[Json]:
        """Yield a chunk's choice for every delta.

        The first has the origins and log-probabilities of the tokens. If there is no delta they wait for the next.
        """
        choice.unsent.append(span)
        additions = [_delta(delta) for delta in span.deltas]
        if not additions and not (self._include_origins and span.tokens):
            return
        span, choice.unsent = TokenSpan.join(choice.unsent), []
        for addition in additions or [{"content": ""}]:
            text = {"delta": addition} if self._is_chat else {"text": addition["content"]}
            yield self._choice(choice, text, span, None)
            span = TokenSpan()

    def _choice(self, choice: ChoiceOutput, text: Json, span: TokenSpan, finish_reason: str | None) -> Json:
        logprobs = None
        if self.body.reported is not None and span.tokens and self._is_chat:
            logprobs = self._chat_logprobs(span.tokens)
        elif self.body.reported is not None and span.tokens:
            logprobs = _completion_logprobs(span.tokens, choice.sent_characters, self.served.token_bytes)
            choice.sent_characters += sum(len(token.text) for token in span.tokens)
        origins = {"origins": [token.origin for token in span.tokens]} if self._include_origins else {}
        return {"index": choice.index, **text, "logprobs": logprobs, "finish_reason": finish_reason, **origins}

    def _chat_logprobs(self, tokens: list[OutputToken]) -> Json:
        content = [
            self.logprob(token.id, found.logprob) | {"top_logprobs": [self.logprob(*best) for best in found.top]}
            for token in tokens
            if (found := token.logprobs) is not None
        ]
        return {"content": content, "refusal": None}

    def _envelope(self, choices: list[Json], suffix: str = ".chunk", **end: Any) -> Json:
        kind = f"chat.completion{suffix}" if self._is_chat else "text_completion"
        envelope = {"id": self.id, "object": kind, "created": self._created, "model": self.model_id}
        envelope["system_fingerprint"] = self.served.fingerprint.text
        return {**envelope, "choices": choices, **end}

    def _stats(self) -> Json:
        stats = Stats.of([choice.stats for choice in self.outputs])
        return {"timings": self.timings(stats), "generation_stats": self.generation_stats(stats)}

    def _usage(self) -> Json:
        """Return the tokens of all choices and of the prompts, each of which was prefilled once."""
        stats = [choice.stats for choice in self.outputs]
        prompts = stats[:: self.body.answers]
        prompt_tokens = sum(each.prompt_tokens for each in prompts)
        generated = sum(each.generation_tokens for each in stats)
        accepted = sum(each.accepted_draft_tokens for each in stats)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": sum(each.prefix_cache_hit for each in prompts)},
            "completion_tokens_details": {
                "reasoning_tokens": sum(choice.reasoning_tokens for choice in self.outputs),
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(each.proposed_draft_tokens for each in stats) - accepted,
            },
        }


def _message(deltas: list[Delta]) -> Json:
    message: Json = {"role": "assistant", "content": "".join(each.text for each in deltas if each.kind == "content")}
    if reasoning := "".join(each.text for each in deltas if each.kind == "reasoning"):
        message["reasoning_content"] = reasoning
    arguments = {each.index: each.text for each in deltas if each.kind == "arguments"}
    if calls := [each for each in deltas if each.kind == "tool_call"]:
        functions = [{"name": call.text, "arguments": arguments.get(call.index, "")} for call in calls]
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {"id": new_id("call_"), "type": "function", "function": function} for function in functions
        ]
    return message


def _delta(delta: Delta) -> Json:
    match delta.kind:
        case "content":
            return {"content": delta.text}
        case "reasoning":
            return {"reasoning_content": delta.text}
        case "tool_call":
            function = {"name": delta.text, "arguments": ""}
            call = {"index": delta.index, "id": new_id("call_"), "type": "function", "function": function}
            return {"tool_calls": [call]}
    return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}


def _completion_logprobs(tokens: list[OutputToken], offset: int, token_bytes: TokenBytes) -> Json:
    """`offset`: where in the text the first token begins."""

    def name(id: int) -> str:
        """Return the text of a token. Parts of characters have none, and two of them must not look the same."""
        return token_bytes(id).decode(errors="backslashreplace")

    found = [token.logprobs for token in tokens]
    return {
        "tokens": [name(token.id) for token in tokens],
        "token_logprobs": [each and max(each.logprob, MIN_LOGPROB) for each in found],
        "top_logprobs": [each and {name(id): max(value, MIN_LOGPROB) for id, value in each.top} for each in found],
        "text_offset": list(accumulate((len(token.text) for token in tokens[:-1]), initial=offset)),
    }
