"""`headstart convert`: a released model to MLX, with its MTP head."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from ..checkpoint.convert import Conversion

MtpBits = Annotated[
    str | None,
    typer.Option(
        "--mtp-bits",
        metavar="keep|2..8",
        help="Bits of the head's matrices, `mtp.fc` excepted.",
        show_default="8 where the trunk is quantised, else keep",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan and its sizes, and write nothing.")]


def convert(
    source: Annotated[str, typer.Argument(help="The original: a folder, a name in the cache, or a hub id.")],
    destination: Annotated[Path, typer.Argument(help="The folder to write. It must not exist.")],
    bits: Annotated[
        int | None, typer.Option("--bits", help="Quantise to so many bits.", show_default="no quantisation")
    ] = None,
    group_size: Annotated[int, typer.Option("--group-size", help="Weights that share a scale: 32, 64, 128.")] = 64,
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", help="mlx-lm's mixed precision instead of --bits: mixed_2_6, mixed_3_4, …"),
    ] = None,
    mtp_bits: MtpBits = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option("--dtype", help="float16 is for M1 and M2.", show_default="the source's"),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Convert a released model to MLX and keep its MTP head. mlx-lm runs the result too, without the head."""
    import mlx.core as mx

    from ..checkpoint import read_layout
    from ..checkpoint.convert import convert as write
    from ..checkpoint.convert import plan_conversion
    from ..checkpoint.layout import release_id
    from ..checkpoint.quantize import Recipe
    from .progress import bytes_bar
    from .remote import fetched

    # What is wrong with the options is said before anything is downloaded.
    Recipe(mx.bfloat16, bits, group_size, recipe, mtp_bits)
    folder = fetched(source, dry_run=dry_run, vision=True)
    if folder is None:
        return
    layout = read_layout(folder)
    original = release_id(folder, layout.family)
    settings = Recipe(getattr(mx, dtype or layout.dtype), bits, group_size, recipe, mtp_bits)
    plan = plan_conversion(layout, destination, settings, original)
    _show(plan)
    if dry_run:
        return
    with bytes_bar(f"Converting to {destination}", plan.read_bytes) as progress:
        write(plan, progress)
    typer.echo(f"Written to {destination}. `headstart inspect {destination}` says what it is.")


def _show(plan: "Conversion") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("file", "tensors", "bytes"):
        table.add_column(column, justify="left" if column == "file" else "right", overflow="fold")
    for file, steps in plan.files.items():
        size = sum(step.nbytes for step in steps)
        table.add_row(file, str(sum(len(step.outputs) for step in steps)), f"{size:,}")
    table.add_row("reads", "", f"{plan.read_bytes:,}")
    table.add_row("writes", "", f"{plan.write_bytes:,}")
    console = Console(markup=False, highlight=False)
    console.print(table)
    head = plan.recipe.head_bits
    if not plan.source.mtp.available:
        console.print("The original has no MTP head, so neither has the result.")
    else:
        console.print(f"MTP head: {'kept as it is' if head is None else f'{head} bits, mtp.fc and norms kept'}.")
