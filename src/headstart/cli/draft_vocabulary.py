"""`headstart draft-vocabulary`: which tokens the head scores when it drafts."""

from pathlib import Path

import typer
from typer import Option

from ..errors import RequestError
from ..open_files import read_text
from . import options
from .download import find_model
from .launch import get_json, server_key

SECONDS = 30.0  # a server gets to answer


@options.with_model
def draft_vocabulary_command(
    model: str | None,
    text: list[Path] | None = Option(None, help="Choose the most frequent tokens of this text. Repeat for more."),
    server: str | None = Option(
        None, metavar="URL", help="Choose the tokens that a server has generated for your key."
    ),
    size: int = Option(32768, min=1, help="Tokens of the list."),
) -> None:
    """Choose the tokens that the head scores. Drafts need the likely tokens only, and scoring all of a large
    vocabulary is most of what a draft costs. The list is written beside the model; at automatic depth the reduced
    head is used where it is faster. Without a text or a server it holds the lowest ids, which is not measured."""
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
            counts.update(tokenizer.encode(read_text(file)))  # type: ignore[union-attr]
        except (OSError, UnicodeError) as error:
            raise RequestError(f"--text {file}: {error}") from error
    if server is not None:
        counts.update(_generated(server.rstrip("/").removesuffix("/v1"), {model, folder.name}, vocabulary))
    origin = f"frequencies of {counts.total()} tokens" if counts else LOWEST
    path = write_draft_tokens(folder, choose_draft_tokens(counts, size, vocabulary), origin, vocabulary)
    typer.echo(f"{path}: {size} of {vocabulary} tokens, {origin}")


def _generated(server: str, names: set[str | None], vocabulary: int) -> dict[int, int]:
    """Return how often the server has generated each token with the model of these names, or with its only one."""
    try:
        models: dict[str, dict[str, int]] = get_json(f"{server}/v1/mtp/tokens", server_key(), SECONDS)["models"]
        found = [models[name] for name in models if name in names] or list(models.values())
        counts = {int(token): int(count) for token, count in found[0].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RequestError(f"--server {server}: {error}. Give the address of a Headstart server") from error
    if len(found) > 1:
        raise RequestError(f"--server {server}: serves {', '.join(models)}. Name one of them")
    if not counts:
        raise RequestError(f"--server {server}: has not generated anything yet. Send it requests first")
    if max(counts) >= vocabulary:
        raise RequestError(f"--server {server}: serves a model with more tokens. Name its model")
    return counts
