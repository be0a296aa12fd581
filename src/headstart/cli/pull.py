"""`headstart pull` and `headstart remove`: models in the Hugging Face cache."""

from pathlib import Path

import typer

from ..errors import HeadstartError
from .download import announce_download
from .progress import Progress

NAME = typer.Argument(metavar="MODEL", help="A hub id, or the name of a known model.")


def pull_command(model: str = NAME) -> None:
    """Download a model from the hub: its text model and its head. After an interruption the same command
    downloads the files that are not complete."""
    from huggingface_hub.utils import disable_progress_bars

    from ..checkpoint.hub import locate, missing_files
    from ..checkpoint.layout import read_layout
    from ..checkpoint.local import pull

    disable_progress_bars()  # ours counts all files together
    repo = locate(model)
    if isinstance(repo, Path):
        typer.echo(f"{model}: nothing to download: it is the folder {repo}")
        return
    files = missing_files(repo)[1]
    announce_download(repo, files, dry_run=False)
    with Progress(sum(files.values()), "bytes") as shown:
        try:
            folder = pull(model, lambda done, total: shown.add(done - shown.done))
        except KeyboardInterrupt:
            raise HeadstartError(f"{repo}: interrupted: complete files are kept. Repeat it for the rest") from None
    head = read_layout(folder).dispatch(mtp=True)
    drafts = f"its head drafts up to {head.max_k} tokens" if head.drafts else f"no drafts: {head.reason}"
    typer.echo(f"{repo}: {folder}; {drafts}")


def remove_command(model: str = NAME, yes: bool = typer.Option(False, "--yes", "-y", help="Do not ask.")) -> None:
    """Delete a downloaded model from the Hugging Face cache."""
    from ..checkpoint.local import cached_folder, folder_bytes, remove

    size = f"{folder_bytes(cached_folder(model)) / 1e9:.2f} GB"
    if not yes:
        typer.confirm(f"Delete {model}, {size}?", abort=True)
    remove(model)
    typer.echo(f"{model}: {size} freed")
