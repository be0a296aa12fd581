"""What the model thought of each token, in the two shapes that OpenAI has for it."""

from collections.abc import Callable
from typing import Any

from .transcript import Piece

Spell = Callable[[int], bytes]  # the bytes of a token

LEAST = -9999.0  # what OpenAI says of the impossible: JSON knows no infinity


def of_chat(piece: Piece, spell: Spell) -> dict[str, Any]:
    return {
        "content": [
            _entry(token, told.logprob, spell)
            | {"top_logprobs": [_entry(best, logprob, spell) for best, logprob in told.top]}
            for token, told in zip(piece.tokens, piece.logprobs, strict=True)
            if told is not None
        ],
        "refusal": None,
    }


def of_completion(piece: Piece, offset: int, spell: Spell) -> dict[str, Any]:
    """`offset`: where in the text the piece begins."""
    offsets = []
    for text in piece.texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": [_name(spell(token)) for token in piece.tokens],
        "token_logprobs": [told and max(told.logprob, LEAST) for told in piece.logprobs],
        "top_logprobs": [
            told and {_name(spell(best)): max(logprob, LEAST) for best, logprob in told.top}
            for told in piece.logprobs
        ],
        "text_offset": offsets,
    }


def _entry(token: int, logprob: float, spell: Spell) -> dict[str, Any]:
    spelt = spell(token)
    return {"token": spelt.decode(errors="replace"), "logprob": max(logprob, LEAST), "bytes": list(spelt)}


def _name(spelt: bytes) -> str:
    """Part of a character has no text, and two parts must not look the same."""
    try:
        return spelt.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)
