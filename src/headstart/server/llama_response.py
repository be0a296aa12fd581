"""Responses of /completion in llama.cpp's own shape, whole or as a stream."""

from collections.abc import AsyncIterator
from typing import Any

from ..engine import Event
from .llama_request import LlamaCompletionRequest
from .response import Events, OutputToken, ResponseWriter, TokenSpan, encode_json

SETTINGS = (
    "seed", "temperature", "top_k", "top_p", "min_p", "top_n_sigma", "xtc_probability", "xtc_threshold",
    "presence_penalty", "frequency_penalty", "stop", "min_tokens",
)  # fmt: skip
STOP_TYPES = {"length": "limit", "stop": "eos"}

Json = dict[str, Any]


class LlamaWriter(ResponseWriter[LlamaCompletionRequest]):
    def __post_init__(self) -> None:
        self._begin("cmpl-")
        self._prompts = [part.prompt for part in self.body.parts()]
        self._contents = [""] * len(self.requests)
        body, params = self.body, self.requests[0].params
        self._settings: Json = {name: getattr(params, name) for name in SETTINGS} | {
            "n_predict": -1 if body.n_predict is None else body.n_predict,
            "repeat_penalty": params.repetition_penalty,
            "repeat_last_n": params.repetition_context_size,
            "n_probs": params.top_logprobs,
            "stream": bool(body.stream),
        }

    async def complete(self, events: Events) -> str:
        ends: dict[int, Json] = {}
        async for event in events:
            output = self.outputs[event.choice]
            output.unsent += self._read(event)
            if event.finish_reason is not None:
                span = TokenSpan.join(output.unsent)
                shown = span if self.body.return_tokens else TokenSpan(span.deltas)
                ends[event.choice] = self._end(event, shown) | self._probabilities(span)
        answers = [self._chosen(ends[index]) for index in sorted(ends)]
        return encode_json(answers if self.body.has_several else answers[0])

    async def stream(self, events: Events) -> AsyncIterator[str]:
        async for event in events:
            for progress in self.prompt_progress(event):
                yield _event(self._chunk(event, TokenSpan()) | {"prompt_progress": progress})
            spans = self._read(event)
            for span in spans if self.body.n_probs else [TokenSpan.join(spans)]:
                if span.tokens:
                    yield _event(self._chunk(event, span) | self._probabilities(span))
            if event.finish_reason is not None:
                yield _event(self._chosen(self._end(event, TokenSpan())))

    def _read(self, event: Event) -> list[TokenSpan]:
        spans = self.outputs[event.choice].read(event)
        self._contents[event.choice] += "".join(delta.text for span in spans for delta in span.deltas)
        return spans

    def _chunk(self, event: Event, span: TokenSpan) -> Json:
        output = self.outputs[event.choice]
        stats = output.stats
        return {
            "index": event.choice,
            "id": self.id,
            "content": "".join(delta.text for delta in span.deltas),
            "tokens": [token.id for token in span.tokens],
            "stop": False,
            "tokens_predicted": stats.generation_tokens,
            "tokens_evaluated": stats.prompt_tokens,
            **self.timings_per_token(output),
        }

    def _end(self, event: Event, span: TokenSpan) -> Json:
        """Return the whole answer, or the last chunk of a stream."""
        stats, prompt = self.outputs[event.choice].stats, self._prompts[event.choice]
        return self._chunk(event, span) | {
            "stop": True,
            "stop_type": "word" if event.stop is not None else STOP_TYPES.get(event.finish_reason or "", "none"),
            "stopping_word": event.stop or "",
            "model": self.model_id,
            "prompt": prompt if isinstance(prompt, str | list) else prompt.prompt_string,
            "has_new_line": "\n" in self._contents[event.choice],
            "truncated": False,
            "tokens_cached": stats.prefix_cache_hit,
            "generation_settings": self._settings,
            "timings": self.timings(stats),
            "generation_stats": self.generation_stats(stats),
            "system_fingerprint": self.served.fingerprint.text,
        }

    def _chosen(self, answer: Json) -> Json:
        """Return the fields that the request wants, such as `content` or `timings/prompt_n`."""
        paths = self.body.response_fields
        return {path: _at(answer, path) for path in paths if _at(answer, path) is not None} if paths else answer

    def _probabilities(self, span: TokenSpan) -> Json:
        if not self.body.n_probs:
            return {}
        return {"completion_probabilities": [self._probability(token) for token in span.tokens]}

    def _probability(self, token: OutputToken) -> Json:
        assert token.logprobs is not None
        top = [self._entry(*best) for best in token.logprobs.top]
        return self._entry(token.id, token.logprobs.logprob) | {"top_logprobs": top}

    def _entry(self, id: int, logprob: float) -> Json:
        return {"id": id, **self.logprob(id, logprob)}


def _at(value: Any, path: str) -> Any:
    for name in path.split("/"):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _event(data: Json) -> str:
    return f"data: {encode_json(data)}\n\n"
