"""Tokens to text as they come, with an end where a stop string begins."""

from collections.abc import Collection

from mlx_lm.tokenizer_utils import TokenizerWrapper


class TextStream:
    """The text of one answer. What might be the beginning of a stop string is held back until it is not."""

    def __init__(self, tokenizer: TokenizerWrapper, stop: Collection[str]):
        self._detokenizer = tokenizer.detokenizer
        self._stop = tuple(stop)
        self._held = ""
        self.stop: str | None = None  # the one that has come up

    @property
    def stopped(self) -> bool:
        return self.stop is not None

    def add(self, token: int) -> str:
        """The text that can be shown now that `token` is known; it may belong to earlier tokens."""
        self._detokenizer.add_token(token)
        return self._release(self._detokenizer.last_segment, last=False)

    def finish(self) -> str:
        """What is left when no token follows."""
        self._detokenizer.finalize()
        return self._release(self._detokenizer.last_segment, last=True)

    def _release(self, segment: str, last: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + segment
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            at, self.stop = min(found)
            self._held = ""
            return text[:at]
        held = 0 if last else max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """How much of the end of `text` is the beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
