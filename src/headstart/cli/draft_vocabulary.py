"""`headstart draft-vocabulary`: which tokens the head scores when it drafts."""

from pathlib import Path

import typer
from typer import Option

from ..errors import RequestError
from . import options
from .download import find_model


@options.with_model
def draft_vocabulary_command(
    model: str | None,
    text: list[Path] | None = Option(None, help="Choose the most frequent tokens of this text. Repeat for more."),
    size: int = Option(32768, min=1, help="Tokens of the list."),
) -> None:
    """Choose the tokens that the head scores. Drafts need the likely tokens only, and scoring all of a large
    vocabulary is most of what a draft costs. The list is written beside the model; at automatic depth the reduced
    head is used where it is faster. Without a text it holds the lowest ids, which is not measured."""
    from collections import Counter

    from ..checkpoint import load_tokenizer, read_layout
    from ..checkpoint.draft_vocabulary import LOWEST, choose_draft_tokens, write_draft_tokens
    from ..models import text_config

    folder = find_model(model)
    vocabulary = int(text_config(read_layout(folder).config)["vocab_size"])
    if size >= vocabulary:
        raise RequestError(f"--size is {size}, but the model has {vocabulary} tokens. Use a smaller --size")
    counts: Counter[int] = Counter()
    tokenizer = load_tokenizer(folder) if text else None
    for file in text or ():
        try:
            counts.update(tokenizer.encode(file.read_text(encoding="utf-8")))  # type: ignore[union-attr]
        except (OSError, UnicodeError) as error:
            raise RequestError(f"--text {file}: {error}") from error
    origin = f"token frequencies of {sum(counts.values())} tokens of text" if text else LOWEST
    path = write_draft_tokens(folder, choose_draft_tokens(counts, size, vocabulary), origin)
    typer.echo(f"{path}: {size} of {vocabulary} tokens, {origin}")
