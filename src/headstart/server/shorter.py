"""Where a conversation that is too long begins, so that the prefix cache finds it in the next turns too.

To leave out as little as possible would begin the prompt elsewhere in every turn, and each would be read as a whole.
So a quarter of the context is left out at a time. Where one ends depends on the messages before it alone: nothing is
remembered, and a conversation that is continued by its id is cut like one that is sent as a whole.
"""

from itertools import pairwise
from typing import Any

from .images import ImagePart
from .responses_items import Messages
from .worker import Encoder

STEPS = 4  # of the context
SAMPLE = 1024  # characters of a text whose tokens are counted
MARKUP = 5  # tokens that a template writes around a message, about
IMAGE = 1024  # tokens of an image, about


def starts_of_shorter(messages: Messages, context: int, encoder: Encoder) -> list[int]:
    """Return the turns with which a shorter conversation may begin: the first one in each quarter of the context, and
    the last of all. `context`: tokens."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if len(turns) < 2:
        return turns or [0]
    sizes = [sum(_tokens(messages[i], encoder) for i in range(*turn)) for turn in pairwise(turns)]
    starts, position = [], 0
    for start, size in zip(turns[1:], sizes, strict=True):
        before, position = position, position + size
        if position * STEPS // context > before * STEPS // context:
            starts.append(start)
    return starts if starts[-1:] == turns[-1:] else [*starts, turns[-1]]


def _tokens(message: dict[str, Any], encoder: Encoder) -> int:
    """Return about how many tokens a message has. Its reasoning is not counted: templates leave out that of earlier
    turns."""
    content = message["content"]
    parts = [content] if isinstance(content, str) else content
    images = sum(isinstance(part, ImagePart) for part in parts)
    texts = [part if isinstance(part, str) else part["text"] for part in parts if not isinstance(part, ImagePart)]
    texts += [str(call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return MARKUP + IMAGE * images + sum(_text_tokens(text, encoder) for text in texts)


def _text_tokens(text: str, encoder: Encoder) -> int:
    sample = text[:SAMPLE]
    return len(encoder.tokens(sample, "text")) * len(text) // len(sample) if sample else 0
