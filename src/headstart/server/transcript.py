"""One answer as it is read: what its tokens add to the message, to thoughts and to calls."""

from dataclasses import dataclass, field

from ..engine import Event, Origin, Stats, TokenLogprobs
from .markup import Content, Delta, Reader, merged


@dataclass(frozen=True)
class Piece:
    """Some tokens and what they add. It may be nothing yet, or belong to tokens before."""

    deltas: list[Delta] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # as they were written
    origins: list[Origin] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # if asked; none of a prompt's first token

    @classmethod
    def of(cls, pieces: "list[Piece]") -> "Piece":
        """All of them in one."""
        return cls(
            merged(delta for each in pieces for delta in each.deltas),
            [token for each in pieces for token in each.tokens],
            [text for each in pieces for text in each.texts],
            [origin for each in pieces for origin in each.origins],
            [told for each in pieces for told in each.logprobs],
        )


class Transcript:
    def __init__(self, reader: Reader | None):
        """Without a reader everything is content."""
        self._reader = reader
        self.reasoning_tokens = 0
        self.finish_reason: str | None = None  # the engine's, or tool_calls
        self.stats: Stats | None = None  # of the answer so far

    def read(self, event: Event) -> list[Piece]:
        """What each token of a round adds. The last one brings what was held back."""
        pieces = []
        for i, (token, text) in enumerate(zip(event.tokens, event.texts, strict=True)):
            told = [event.logprobs[i]] if event.logprobs is not None else []
            pieces.append(Piece(self._feed(text), [token], [text], [event.origins[i]], [*told]))
        self.stats = event.stats
        if event.finish_reason is not None:
            self.finish_reason = event.finish_reason
            if self._reader is not None:
                pieces.append(Piece(self._reader.finish()))
                if self._reader.called and self.finish_reason == "stop":
                    self.finish_reason = "tool_calls"
        return pieces

    def _feed(self, text: str) -> list[Delta]:
        if self._reader is None:
            return [Content(text)] if text else []
        before = self._reader.thinking
        deltas = self._reader.feed(text)
        self.reasoning_tokens += before or self._reader.thinking  # its marks count too
        return deltas
