"""`headstart graft`: give a converted model the MTP head that it lost."""

from typing import Annotated

import typer

from .convert import DryRun, MtpBits


def graft(
    model: Annotated[str, typer.Argument(help="The converted model: a folder, a name in the cache, or a hub id.")],
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="The original: a folder or a hub id. Of a hub model only the files with the head are downloaded.",
            show_default="as its README or model card says",
        ),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Into the shards and their index, not into a file of its own.")
    ] = False,
    mtp_bits: MtpBits = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            "--group-size",
            help="Weights of the head that share a scale: 32, 64, 128.",
            show_default="the trunk's, or 64 where it is not quantised",
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Take the head of another model of the same sizes, such as a fine-tune's base."),
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Bring the MTP head back to a converted model: exactly the head that `headstart convert` would have kept."""
    from pathlib import Path

    import mlx.core as mx

    from ..checkpoint import hub, read_layout
    from ..checkpoint.config import read_config
    from ..checkpoint.graft import check_name, check_sizes, plan_graft
    from ..checkpoint.graft import graft as write
    from ..checkpoint.layout import original_id
    from ..checkpoint.quantize import Recipe
    from ..errors import CheckpointError
    from .progress import bytes_bar
    from .remote import fetched

    # What is wrong with the options is said before anything is downloaded.
    Recipe(mx.bfloat16, group_size=64 if group_size is None else group_size, mtp_bits=mtp_bits)
    converted = fetched(model, dry_run=dry_run, vision=False)
    if converted is None:
        return
    layout = read_layout(converted)
    original = original_id(layout.path, layout.family)
    if source is None and original is None:
        raise CheckpointError(f"{layout.path}: nothing says what it was made from. Name the original with --from.")
    found = hub.locate(source or original)
    if isinstance(found, Path):
        folder = found
    else:
        folder, files = hub.missing_files(found, text=False)
    name = str(found)
    check_sizes(layout, name, read_config(folder))
    if not force:
        check_name(layout, found, original)
    if isinstance(found, str) and files:
        if dry_run:
            typer.echo(f"{found}: {len(files)} files, {sum(files.values()):,} bytes would be downloaded first.")
            return
        hub.download_files(found, folder, files)
    plan = plan_graft(layout, folder, mtp_bits=mtp_bits, group_size=group_size, merge=merge, force=force)
    typer.echo(f"{layout.path / plan.file}: {plan.write_bytes:,} bytes, from {plan.read_bytes:,} of {name}.")
    if not plan.compared and not force:
        typer.echo("Its files hold nothing of the trunk to compare: that it is this model's, sizes and names say.")
    if merge and layout.family == "qwen3_next":
        typer.echo("Note: mlx-lm refuses a Qwen3-Next model with a head in its shards. Without --merge it runs it.")
    if dry_run:
        return
    with bytes_bar("Grafting", plan.read_bytes) as progress:
        write(plan, progress)
    typer.echo(f"Written. `headstart inspect {layout.path}` says what the model is now.")
