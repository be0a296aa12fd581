"""`headstart report`: how Headstart runs on this machine, as a page to paste into an issue."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer
from typer import Option

from . import options
from .download import find_model
from .progress import Progress
from .show import check_output, write_output

if TYPE_CHECKING:
    from ..bench.machine_report import MachineReport


@options.with_model
def report_command(
    model: str | None,
    output: Path | None = Option(None, metavar="FILE", help="Also write the report to a file."),
) -> None:
    """Report how Headstart runs on this machine, to paste into an issue: device, memory, kernels beside stock ops,
    speed at k = 0 to 4 and whether the output is the same, on the built-in model and on MODEL. Names no user, host or
    folder. Exits with status 1 when something is wrong."""
    from ..bench.machine_report import STEPS, MachineReport, report_machine
    from ..bench.time_limit import WHOLE, ended_if_it_hangs
    from ..checkpoint import read_layout
    from ..checkpoint.layout import hub_id

    check_output(output)
    folders = list(dict.fromkeys((find_model(None), find_model(model))))
    names = [hub_id(folder) or folder.absolute().name for folder in folders]
    sizes = [f"{read_layout(folder).bytes / 1e9:.1f} GB" for folder in folders]
    more = f", and what it takes for {names[1]} ({sizes[1]})" if names[1:] else ""
    long = f"About a minute for {names[0]}{more}; at most {WHOLE / 60:.0f} minutes"
    typer.echo(
        f"{long}, and what is not finished then says so. It asks the system for facts, loads each model, decodes at "
        "k = 0 to 4, alone and in a batch, and compares kernels with MLX's. The report names no user, host or "
        "folder. Leave the machine otherwise idle.",
        err=True,
    )
    with Progress(STEPS * len(names), "steps") as progress:
        report = MachineReport(progress.begin)
        with ended_if_it_hangs(report.limit, lambda: _hand_over(report.hung(), output)):
            try:
                report_machine(report, list(zip(names, folders, strict=True)))
            except KeyboardInterrupt:
                report.failed.append("interrupted")
    _hand_over(report, output)
    if report.failed:
        raise typer.Exit(130 if "interrupted" in report.failed else 1)


def _hand_over(report: "MachineReport", output: Path | None) -> None:
    """Print a report, and what to do with it."""
    text = report.markdown()
    typer.echo(text, nl=False)
    if output is not None:
        write_output(output, text)
    what = f"the file {output}" if output else "all from `# Headstart report` on"
    typer.echo(
        f"\nRead it, then paste {what} into a new issue of the project, of the kind *Report from a machine*.",
        err=True,
    )
