"""Files that a command writes when it is done, and that are looked at before it begins."""

import json
import os
from pathlib import Path
from typing import Any, Protocol

import typer

from ..errors import HeadstartError, RequestError

INTERRUPTED = "interrupted"  # why a report is not complete after Ctrl-C; the status is 130 then, as elsewhere


class Report(Protocol):
    def as_dict(self) -> dict[str, Any]: ...

    def markdown(self) -> str: ...


def check_folders(files: dict[str, Path | str | None]) -> None:
    """Minutes of measuring must not end in a folder that is not there. - is standard output."""
    for option, file in files.items():
        if file is None or file == "-":
            continue
        path = Path(file).absolute()
        if not path.parent.is_dir():
            raise RequestError(f"{option} {file}: there is no such folder")
        if path.is_dir():
            raise RequestError(f"{option} {file}: a folder. Name a file in it")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise RequestError(f"{option} {file}: cannot be written to. Name a file in another folder")


def tell(report: Report, json_file: str | None, report_file: Path | None) -> None:
    """Markdown goes to standard output, unless JSON is wanted there."""
    if json_file == "-":
        typer.echo(json.dumps(report.as_dict()))
    else:
        typer.echo(report.markdown(), nl=False)
        if json_file is not None:
            write(Path(json_file), json.dumps(report.as_dict()), "--json")
    if report_file is not None:
        write(report_file, report.markdown(), "--report")


def write(path: Path, text: str, option: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise HeadstartError(f"{option} {path}: cannot be written: {error}") from error
