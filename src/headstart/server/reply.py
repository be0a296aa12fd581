"""What OpenAI's clients are answered: whole, or in chunks as it comes."""

import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..engine import Event, Stats, TokenLogprobs
from ..engine.text import TextStream
from . import logprobs
from .answer import Answer
from .completion import Choice, Completion, FunctionCall, Kind, Said, ToolCall, Usage
from .drafts import clamped_to
from .errors import to_refusal
from .markup import Content, Delta, Message, Reasoning, ToolArguments
from .markup import ToolCall as Call
from .openai import Asked, ChatRequest, CompletionRequest
from .prompt import Prompt
from .served_model import ServedModel
from .transcript import Piece, Transcript


@dataclass
class Telling:
    """One choice of a reply."""

    index: int
    transcript: Transcript
    pieces: list[Piece] = field(default_factory=list)  # not told yet
    characters: int = 0  # told
    begun: bool = False  # after the prompt, where that is echoed


class Reply:
    """One reply in the shape that its request asked for."""

    def __init__(self, asked: Asked, prompt: Prompt, served: ServedModel):
        self._asked, self._served = asked, served
        self._created, self._chat = int(time.time()), isinstance(asked, ChatRequest)
        self._echo = prompt.text if isinstance(asked, CompletionRequest) and asked.echo else None
        self._prompt, self._scores = prompt, list[TokenLogprobs]()
        self._choices = [Telling(i, Transcript(prompt.reader())) for i in range(asked.choices)]
        self.id = f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}"

    async def whole(self, answer: Answer) -> str:
        async for event in answer.events():
            choice, pieces = self._read(event)
            choice.pieces += pieces
        choices = [self._whole(choice) for choice in self._choices]
        whole = self._envelope("chat.completion" if self._chat else "text_completion", choices, **self._end())
        return whole.model_dump_json(exclude_unset=True)

    async def stream(self, answer: Answer) -> AsyncIterator[str]:
        """Server-sent events. An error is one of them, since the status has been sent by then."""
        try:
            async for chunk in self._chunks(answer):
                yield f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"
        except Exception as error:
            yield to_refusal(error).event
        yield "data: [DONE]\n\n"

    async def _chunks(self, answer: Answer) -> AsyncIterator[Completion]:
        kind: Kind = "chat.completion.chunk" if self._chat else "text_completion"
        if self._chat:
            for choice in self._choices:
                opening = Choice(index=choice.index, delta=Said(role="assistant", content=""), finish_reason=None)
                yield self._envelope(kind, [opening])
        left = len(self._choices)
        async for event in answer.events():
            choice, pieces = self._read(event)
            # A chunk a round, or one a token where origins are wanted, so that every text stands beside its own.
            for piece in pieces if self._asked.include_origins else [Piece.of(pieces)]:
                for part in self._parts(choice, piece):
                    yield self._envelope(kind, [part])
            if event.finish_reason is None:
                continue
            left -= 1
            last = not left and not self._asked.usage_in_stream
            yield self._envelope(kind, [self._last(choice)], **(self._stats() if last else {}))
        if self._asked.usage_in_stream:
            yield self._envelope(kind, [], **self._end())

    def _read(self, event: Event) -> tuple[Telling, list[Piece]]:
        """What an event adds to its choice. Where the prompt is to be echoed it comes first, once all is known of
        it."""
        choice = self._choices[event.choice]
        self._scores += event.prompt_logprobs or ()
        pieces = choice.transcript.read(event)
        if self._echo is not None and not choice.begun and (event.tokens or event.finish_reason):
            choice.begun = True
            pieces.insert(0, self._echoed(self._echo))
        return choice, pieces

    def _echoed(self, text: str) -> Piece:
        if self._asked.wanted_logprobs() is None:
            return Piece([Content(text)])
        stream, tokens = TextStream(self._served.tokenizer, ()), self._prompt.tokens
        texts = [stream.add(token) for token in tokens]
        texts[-1] += stream.finish()
        return Piece([Content(text)], tokens, texts, [], [None, *self._scores])

    def _parts(self, choice: Telling, piece: Piece) -> Iterator[Choice]:
        """A chunk for everything that a piece adds. The first has the piece's origins and log-probabilities; where
        nothing is added these wait for the next."""
        choice.pieces.append(piece)
        told = any(_delta(delta) is not None for delta in piece.deltas)
        if not told and not (self._asked.include_origins and piece.tokens):
            return
        piece, choice.pieces = Piece.of(choice.pieces), []
        parts = [part for delta in piece.deltas if (part := _delta(delta)) is not None]
        for part in parts or [Said(content="")]:
            said = {"delta": part} if self._chat else {"text": part.content}
            yield Choice(index=choice.index, **said, **self._beside(choice, piece), finish_reason=None)
            piece = Piece()

    def _last(self, choice: Telling) -> Choice:
        said: dict[str, Any] = {"delta": Said()} if self._chat else {"text": ""}
        beside = self._beside(choice, Piece.of(choice.pieces))
        return Choice(index=choice.index, **said, **beside, finish_reason=choice.transcript.finish_reason)

    def _whole(self, choice: Telling) -> Choice:
        piece = Piece.of(choice.pieces)
        message = Message.of(piece.deltas)
        said = {"message": _said(message)} if self._chat else {"text": message.content}
        beside = self._beside(choice, piece)
        return Choice(index=choice.index, **said, **beside, finish_reason=choice.transcript.finish_reason)

    def _beside(self, choice: Telling, piece: Piece) -> dict[str, Any]:
        """What is told of tokens beside their text."""
        beside: dict[str, Any] = {"logprobs": None}
        if piece.logprobs and self._chat:
            beside["logprobs"] = logprobs.of_chat(piece, self._served.spell)
        elif piece.logprobs:
            beside["logprobs"] = logprobs.of_completion(piece, choice.characters, self._served.spell)
            choice.characters += sum(map(len, piece.texts))
        if self._asked.include_origins:
            beside["origins"] = piece.origins
        return beside

    def _envelope(self, kind: Kind, choices: list[Choice], **end: Any) -> Completion:
        return Completion(
            id=self.id, object=kind, created=self._created, model=self._served.id, choices=choices, **end
        )

    def _end(self) -> dict[str, Any]:
        return {"usage": Usage.of([choice.transcript for choice in self._choices]), **self._stats()}

    def _stats(self) -> dict[str, Any]:
        stats = [choice.transcript.stats for choice in self._choices]
        told = Stats.of([each for each in stats if each is not None])
        ignored = sorted([*self._asked.ignored(), *self._prompt.ignored])
        clamped = clamped_to(self._asked.num_draft_tokens, told.clamped_to)
        beyond = {"ignored_fields": ignored, "num_draft_tokens_clamped_to": clamped}
        return {"generation_stats": told.as_dict() | beyond}


def _said(message: Message) -> Said:
    said: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning:
        said["reasoning_content"] = message.reasoning
    if message.calls:
        said["content"] = message.content or None
        said["tool_calls"] = [
            ToolCall(id=_call_id(), type="function", function=FunctionCall(name=call.name, arguments=call.arguments))
            for call in message.calls
        ]
    return Said(**said)


def _delta(delta: Delta) -> Said | None:
    """What a chunk says of it. A call that breaks off cannot be taken back: its text follows."""
    match delta:
        case Content(text):
            return Said(content=text)
        case Reasoning(text):
            return Said(reasoning_content=text)
        case Call(index, name):
            function = FunctionCall(name=name, arguments="")
            return Said(tool_calls=[ToolCall(index=index, id=_call_id(), type="function", function=function)])
        case ToolArguments(index, fragment):
            return Said(tool_calls=[ToolCall(index=index, function=FunctionCall(arguments=fragment))])
    return None


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
