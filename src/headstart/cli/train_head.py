"""`headstart train-head`: a head for a model that has none, or a better one."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer
from typer import Argument, Option

from ..errors import RequestError
from . import options
from .download import find_model
from .progress import show_line

if TYPE_CHECKING:
    from ..training.train import Status


def train_head_command(
    model: str = Argument(help="The model: a folder, a name in the cache, or a hub id."),
    output: Path = Option(..., "--output", "-o", metavar="FOLDER", help="Where to write the head, or to go on."),
    minutes: float = Option(60.0, help="Stop after so many minutes, or when acceptance stops rising."),
    head: str | None = Option(None, "--from", metavar="HEAD", help="Go on from this head: a folder or a hub id."),
    prompts: Path | None = Option(
        None, metavar="FILE", help='Prompts, one JSON object per line: {"text": …} or {"messages": […]}.'
    ),
    from_traffic: Path | None = Option(
        None, metavar="FILE", help="Train on the conversations that `serve --record FILE` wrote."
    ),
    mtp_bits: str | None = options.MTP_BITS,
) -> None:
    """Train a multi-token-prediction head for a model, on text that the model generates itself. The model stays as it
    is. After Ctrl-C or a crash the same command goes on from the last checkpoint."""
    import mlx.core as mx

    from ..checkpoint import read_layout
    from ..checkpoint.hub import resolve_head
    from ..checkpoint.quantize import Recipe
    from ..training.head import require_trainable
    from ..training.store import tokens_per_round
    from ..training.train import TrainingPlan, train

    if not minutes > 0:
        raise RequestError(f"--minutes is {minutes}; it must be above 0")
    if prompts is not None and from_traffic is not None:
        raise RequestError("--prompts and --from-traffic: give one of them")
    layout = read_layout(find_model(model))
    require_trainable(layout)
    own = layout.quantization or {"bits": None, "mode": None, "group_size": None}
    group = own["group_size"] if own["mode"] == "affine" else None
    recipe = Recipe(getattr(mx, layout.dtype), own["bits"], group, mtp_bits)
    source = resolve_head(head) if head is not None else None
    show = _Shown()
    try:
        before, after = train(TrainingPlan(layout, output, minutes, recipe, prompts, from_traffic, source), show)
    except KeyboardInterrupt:
        show_line("")
        typer.echo(f"Stopped. The same command goes on from here; {output} keeps what was trained.", err=True)
        raise typer.Exit(130) from None
    show_line("")
    if source is not None:
        typer.echo(f"Before: {_acceptance(before)}, {tokens_per_round(before):.2f} tokens a round.")
    typer.echo(f"Now: {_acceptance(after)}, {tokens_per_round(after):.2f} tokens a round.")
    typer.echo(f"Written to {output}. Draft with it: headstart serve {model} --head {output}")
    if not layout.mtp.available and layout.layout != "gguf":
        typer.echo(f"Or put it into the model: headstart graft {layout.path} --from {output}")


def _acceptance(measured: list[float]) -> str:
    return "accepted " + ", ".join(f"{share:.1%}" for share in measured[2:])


class _Shown:
    """A line for every measurement, and on a terminal one that is rewritten."""

    def __call__(self, status: "Status") -> None:
        measured = status.measured
        head = f"{status.seconds / 60:.1f} min: {status.text:,} tokens written, {status.trained:,} trained"
        if measured:
            head += f", loss {measured[1]:.2f}, {_acceptance(list(measured))}"
        if status.doing == "measured":
            show_line("")
            typer.echo(f"{head}; about {status.left / 60:.0f} min left", err=True)
        else:
            show_line(f"{head}; {status.doing}, about {status.left / 60:.0f} min left")
