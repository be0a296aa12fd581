"""draft_vocabulary.json beside a model: the tokens that its head scores when that is faster than scoring all."""

import json
from collections.abc import Mapping
from pathlib import Path

from ..errors import CheckpointError

NAME = "draft_vocabulary.json"
LOWEST = "lowest ids (not measured)"  # merge order: the shorter and more frequent tokens of a tokenizer come first


def choose_draft_tokens(counts: Mapping[int, int], size: int, vocabulary: int) -> list[int]:
    """Return the `size` most frequent tokens, filled up with the lowest ids, in rising order."""
    frequent = sorted((token for token in counts if 0 <= token < vocabulary), key=lambda each: (-counts[each], each))
    chosen = dict.fromkeys([*frequent[:size], *range(min(size, vocabulary))])
    return sorted(list(chosen)[:size])


def write_draft_tokens(folder: Path, ids: list[int], origin: str, vocabulary: int) -> Path:
    path = folder / NAME
    path.write_text(json.dumps({"origin": origin, "vocabulary": vocabulary, "ids": ids}), encoding="utf-8")
    return path


def read_draft_tokens(folder: Path, vocabulary: int) -> tuple[list[int], str] | None:
    """Return the ids and how they were chosen; None if there is no list."""
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        ids, size, origin = list(stored["ids"]), stored["vocabulary"], str(stored["origin"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a list of tokens ({error}). Delete it or write it again.") from error
    if size != vocabulary:
        raise CheckpointError(f"{path}: made for {size} tokens; this model has {vocabulary}. Write the list again.")
    known = all(type(token) is int and 0 <= token < vocabulary for token in ids)
    if not ids or not known or len(set(ids)) < len(ids):
        raise CheckpointError(f"{path}: ids must be different tokens below {vocabulary}. Write the list again.")
    return ids, origin
