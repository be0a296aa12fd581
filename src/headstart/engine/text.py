"""Turn tokens into text as they come, and find stop strings."""

from collections.abc import Collection

from mlx_lm.tokenizer_utils import TokenizerWrapper

CONTEXT = 4  # tokens decoded again with the next one: a character has up to four bytes, and each may be a token
MAX_INCOMPLETE = 16  # tokens held back for the rest of a character; after that there is none


class TextStream:
    """The text of one answer: what the tokenizer decodes all of its tokens to, from the first character on.

    mlx-lm's own detokenizer would drop a leading space. Text that may be the start of a stop string is held back
    until it is not. Without a tokenizer every token's text is empty.
    """

    def __init__(self, tokenizer: TokenizerWrapper | None, stop: Collection[str]):
        self._tokenizer = tokenizer
        self._window: list[int] = []  # the last tokens, some of them shown: a token's text may depend on those before
        self._shown = 0  # characters of the window's text
        self._stop = tuple(stop)
        self._held = ""
        self.stop: str | None = None  # the stop string that was found

    @property
    def stopped(self) -> bool:
        return self.stop is not None

    def add(self, token: int) -> str:
        """Return the text that `token` completes; some may belong to tokens before it."""
        self._window.append(token)
        text = self._text()
        incomplete = text.endswith("\ufffd")  # perhaps the first bytes of a character
        if incomplete and len(self._window) < MAX_INCOMPLETE:
            return ""
        segment = text[self._shown : len(text) - incomplete]  # only the last character can still be completed
        self._window = self._window[-CONTEXT:]
        self._shown = len(self._text()) - incomplete
        return self._release(segment, last=False)

    def finish(self) -> str:
        """Return the text that was held back, when no token follows."""
        return self._release(self._text()[self._shown :], last=True)

    def _text(self) -> str:
        return str(self._tokenizer.decode(self._window)) if self._tokenizer is not None else ""

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
    """Return how many characters at the end of `text` are the beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
