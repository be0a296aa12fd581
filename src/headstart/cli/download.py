"""Find the model that a command names, and say how much has to be downloaded before that begins."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import typer

from ..errors import CheckpointError


def find_model(name: str | None, *, vision: bool = False, dry_run: bool = False) -> Path:
    """Return the model's folder, downloaded where needed. A dry run exits instead of downloading.

    `vision`: with the tensors of its vision part.
    """
    from ..checkpoint.hub import download, locate

    found = locate(name)
    if isinstance(found, Path):
        return found
    return download(found, vision=vision, announce=partial(announce_download, found, dry_run=dry_run))


def message_alone(model: str | None, message: str | None) -> tuple[str | None, str | None]:
    """Return the model and the message that a user wrote: one argument that names no model is a message."""
    from ..checkpoint.hub import locate

    if not model or message is not None:
        return model, message
    try:
        locate(model)
    except CheckpointError:
        typer.echo("No model has this name: it is the prompt, for the small built-in one.", err=True)
        return None, model
    return model, None


def find_drafter(name: str | None) -> Path | None:
    """Return the folder of a block drafter, downloaded where needed; None without a name."""
    return None if name is None else find_model(name)


def announce_download(repo: str, files: Mapping[str, int], *, dry_run: bool) -> None:
    """Say how much will be downloaded, if anything: files and their sizes. A dry run ends here."""
    if not files:
        return
    size = f"{repo}: {len(files)} files, {sum(files.values()):,} bytes"
    if dry_run:
        typer.echo(f"{size} would be downloaded first.")
        raise typer.Exit
    typer.echo(f"Downloading {size}.", err=True)
