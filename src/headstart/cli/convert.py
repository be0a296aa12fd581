"""`headstart convert`: a released model to MLX, with its MTP head. `headstart graft`: a lost head back."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer
from typer import Argument, Option

from ..errors import CheckpointError
from . import options
from .download import announce_download, find_model
from .progress import Progress
from .show import print_table

if TYPE_CHECKING:
    from ..checkpoint.convert import Conversion
    from ..checkpoint.quantize import Recipe

GROUP_SIZE = "Weights that share a scale: 32, 64 or 128."


def convert_command(
    source: str = Argument(help="The original: a folder, a name in the cache, or a hub id."),
    destination: Path = Argument(help="The folder to write. It must not exist."),
    bits: int | None = Option(None, help="Quantise to this many bits.", show_default="no quantisation"),
    mode: Literal["affine", "mxfp4", "mxfp8", "nvfp4"] | None = Option(
        None, help="Quantise in this mode.", show_default="affine, with --bits"
    ),
    group_size: int | None = Option(None, help=GROUP_SIZE, show_default="64, or the mode's"),
    mix: str | None = Option(
        None,
        help="Bits or mode of the matrices that matter most, or a JSON file: patterns of names, and bits or mode.",
    ),
    mtp_bits: str | None = options.MTP_BITS,
    dtype: Literal["bfloat16", "float16", "float32"] | None = Option(
        None, help="Type of what is not quantised.", show_default="the source's"
    ),
    head: str | None = Option(None, metavar="MODEL", help="Take the head from another folder."),
    dequantize: bool = Option(False, "--dequantize", help="Widen what is quantised first."),
    dry_run: bool = options.DRY_RUN,
) -> None:
    """Convert a released model to MLX and keep its MTP head. mlx-lm runs the result too, without the head. A block
    drafter is quantised but for what joins it to its model."""
    import mlx.core as mx

    from ..checkpoint import read_layout
    from ..checkpoint.convert import convert, plan_conversion
    from ..checkpoint.drafter import is_drafter
    from ..checkpoint.hub import resolve_head
    from ..checkpoint.layout import release_id
    from ..checkpoint.quantize import Recipe

    settings = Recipe(
        mx.bfloat16, bits, group_size, mtp_bits, mode, mix, dequantize
    )  # wrong options are refused before downloads
    folder = find_model(source, vision=True, dry_run=dry_run)
    if is_drafter(folder):
        _convert_drafter(folder, destination, settings, dtype, dry_run)
        return
    layout = read_layout(folder, resolve_head(head) if head is not None else None)
    original = release_id(folder, layout.family)
    settings = replace(settings, dtype=getattr(mx, dtype or layout.dtype))
    plan = plan_conversion(layout, destination, settings, original)
    _print_plan(plan)
    if dry_run:
        return
    with Progress(plan.nbytes, "bytes") as progress:
        convert(plan, progress.add)
    typer.echo(f"Written to {destination}. See it with `headstart inspect {destination}`.")


def _convert_drafter(folder: Path, destination: Path, recipe: "Recipe", dtype: str | None, dry_run: bool) -> None:
    import mlx.core as mx

    from ..checkpoint.drafter import convert_drafter, read_drafter

    layout = read_drafter(folder)
    recipe = replace(recipe, dtype=getattr(mx, dtype or layout.dtype))
    nbytes = convert_drafter(layout, destination, recipe, dry_run=dry_run)
    typer.echo(f"{destination}: a block drafter, {nbytes:,} bytes{', not written' if dry_run else ''}.")


def _print_plan(plan: "Conversion") -> None:
    from ..checkpoint.tables import TABLES

    rows = [["file", "tensors", "bytes"]]
    for file, arrays in plan.files.items():
        rows.append([file, f"{len(arrays):,}", f"{sum(array.nbytes for array in arrays.values()):,}"])
    if tables := plan.source.tables:
        rows.append([TABLES, f"{len(tables):,}", f"{sum(table.nbytes for table in tables):,}"])
    rows.append(["in all", "", f"{plan.nbytes:,}"])
    print_table(rows, right=(1, 2))
    head = plan.recipe.head_bits
    if not plan.source.mtp.available:
        typer.echo("The original has no MTP head, so neither has the result.")
    else:
        typer.echo(f"MTP head: {'kept as it is' if head is None else f'{head} bits, mtp.fc and norms kept'}.")


def graft_command(
    model: str = Argument(help="The converted model: a folder, a name in the cache, or a hub id."),
    source: str | None = Option(
        None, "--from", help="The original: a folder or a hub id.", show_default="as its README or model card says"
    ),
    mtp_bits: str | None = options.MTP_BITS,
    group_size: int | None = Option(None, help=GROUP_SIZE, show_default="the trunk's, or 64"),
    dry_run: bool = options.DRY_RUN,
) -> None:
    """Bring a lost MTP head back to a converted model. It is the head that `headstart convert` would have kept."""
    import mlx.core as mx

    from ..checkpoint import hub, read_layout
    from ..checkpoint.config import read_config
    from ..checkpoint.convert import SIDECAR
    from ..checkpoint.graft import graft, plan_graft, require_lost_head
    from ..checkpoint.head import check_final_norm, check_sizes
    from ..checkpoint.layout import original_id
    from ..checkpoint.quantize import Recipe

    # Refuse wrong options before anything is downloaded.
    Recipe(mx.bfloat16, group_size=group_size, mtp_bits=mtp_bits)
    layout = read_layout(find_model(model, dry_run=dry_run))
    require_lost_head(layout)
    original = original_id(layout.path, layout.family)
    if source is None and original is None:
        raise CheckpointError(f"{layout.path}: nothing says what it was made from. Name the original with --from.")
    found = hub.locate(source or original)
    folder, files = (found, {}) if isinstance(found, Path) else hub.missing_files(found, text=False)
    name = str(found)
    check_sizes(layout.path, layout.config, name, read_config(folder, drafter=True))
    if isinstance(found, str):
        with hub.final_norm_folder(found, folder) as place:
            check_final_norm(layout.path, layout.config, layout.stored, place, name)
    if files:
        announce_download(name, files, dry_run=dry_run)
        hub.download_files(name, folder, files)
    plan = plan_graft(layout, folder, mtp_bits=mtp_bits, group_size=group_size)
    typer.echo(f"{layout.path / SIDECAR}: {plan.nbytes:,} bytes, from {name}.")
    if dry_run:
        return
    with Progress(plan.nbytes, "bytes") as progress:
        graft(plan, progress.add)
    typer.echo(f"Written. See the model with `headstart inspect {layout.path}`.")
