"""A source of weights that may be on the hub: downloaded, or in a dry run only measured."""

from pathlib import Path

import typer


def fetched(name: str, *, dry_run: bool, vision: bool) -> Path | None:
    """The model's folder. None where a dry run would have to download it."""
    from ..checkpoint.hub import download, locate, missing_files

    found = locate(name)
    if isinstance(found, Path):
        return found
    if dry_run and (files := missing_files(found, vision=vision)[1]):
        typer.echo(f"{found}: {len(files)} files, {sum(files.values()):,} bytes would be downloaded first.")
        return None
    return download(found, vision=vision)
