"""Tokens to text as they come, with an end where a stop string begins."""

from collections.abc import Collection

from mlx_lm.tokenizer_utils import TokenizerWrapper

KEPT = 4  # tokens: a character has up to four bytes, and each may be a token
MOST = 16  # tokens that wait for the rest of a character. By then there is none


class TextStream:
    """The text of one answer: what the tokenizer makes of all of its tokens, from the first character on. mlx-lm's
    own would drop a space there. What might be the beginning of a stop string is held back until it is not."""

    def __init__(self, tokenizer: TokenizerWrapper, stop: Collection[str]):
        self._tokenizer = tokenizer
        self._window: list[int] = []  # the last tokens: some that were shown, as tokens may depend on those before
        self._shown = 0  # characters of the window's text
        self._stop = tuple(stop)
        self._held = ""
        self.stop: str | None = None  # the one that has come up

    @property
    def stopped(self) -> bool:
        return self.stop is not None

    def add(self, token: int) -> str:
        """The text that can be shown now that `token` is known; it may belong to earlier tokens."""
        self._window.append(token)
        text = self._text()
        part = text.endswith("\ufffd")  # of a character, perhaps
        if part and len(self._window) < MOST:
            return ""
        segment = text[self._shown : len(text) - part]  # of many parts only the last can still become one
        self._window = self._window[-KEPT:]
        self._shown = len(self._text()) - part
        return self._release(segment, last=False)

    def finish(self) -> str:
        """What is left when no token follows."""
        return self._release(self._text()[self._shown :], last=True)

    def _text(self) -> str:
        return str(self._tokenizer.decode(self._window))

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
