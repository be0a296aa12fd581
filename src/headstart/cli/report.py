"""`headstart report`: how Headstart runs on this machine, as a page to paste into an issue."""

from pathlib import Path

import typer
from typer import Option

from . import options
from .download import find_model
from .progress import Progress
from .show import check_output, write_output


@options.with_model
def report_command(
    model: str | None,
    output: Path | None = Option(None, metavar="FILE", help="Also write the report to a file."),
) -> None:
    """Report how Headstart runs on this machine, to paste into an issue: device, memory, kernels beside stock ops,
    speed at k = 0 to 4 and whether the output is the same, on the built-in model and on MODEL. Names no user, host or
    folder. Exits with status 1 when something is wrong."""
    from ..bench.machine_report import DECODED, STEPS, MachineReport, report_machine
    from ..checkpoint import read_layout
    from ..checkpoint.layout import hub_id

    check_output(output)
    folders = list(dict.fromkeys((find_model(None), find_model(model))))
    names = [hub_id(folder) or folder.absolute().name for folder in folders]
    more = [(name, read_layout(folder).bytes / 1e9) for name, folder in zip(names[1:], folders[1:], strict=True)]
    plan = [f"about a minute for {names[0]} (more where kernels are compiled first)"]
    plan += [f"for {name} ({size:.1f} GB) as long as decoding {DECODED:,} tokens one by one" for name, size in more]
    typer.echo(
        f"Measuring kernels, and decoding at k = 0 to 4, alone and in a batch: {', '.join(plan)}. The report "
        "names no user, host or folder. Leave the machine otherwise idle.",
        err=True,
    )
    with Progress(STEPS * len(names), "steps") as progress:
        report = MachineReport(progress.begin)
        try:
            report_machine(report, list(zip(names, folders, strict=True)))
        except KeyboardInterrupt:
            report.failed.append("interrupted")
    text = report.markdown()
    typer.echo(text, nl=False)
    if output is not None:
        write_output(output, text)
    if report.failed:
        raise typer.Exit(130 if "interrupted" in report.failed else 1)
