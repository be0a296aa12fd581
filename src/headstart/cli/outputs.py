"""The report of a command: printed, and written to a file whose folder is checked before the work begins."""

import json
import os
from pathlib import Path
from typing import Any, Protocol

import typer

from ..errors import HeadstartError, RequestError


class Reportable(Protocol):
    def as_dict(self) -> dict[str, Any]: ...

    def markdown(self) -> str: ...


def check_folders(files: dict[str, Path | None]) -> None:
    """Refuse files in folders that do not exist: minutes of measuring must not be lost."""
    for option, file in files.items():
        if file is None:
            continue
        path = file.absolute()
        if not path.parent.is_dir():
            raise RequestError(f"{option} {file}: there is no such folder")
        if path.is_dir():
            raise RequestError(f"{option} {file}: a folder. Name a file in it")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise RequestError(f"{option} {file}: cannot be written to. Name a file in another folder")


def print_report(report: Reportable, as_json: bool, output: Path | None) -> None:
    """Print Markdown or JSON, and write the file of `--output`: JSON where its name ends in .json, else Markdown."""
    typer.echo(json.dumps(report.as_dict()) if as_json else report.markdown(), nl=as_json)
    if output is not None:
        text = json.dumps(report.as_dict()) if output.suffix == ".json" else report.markdown()
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise HeadstartError(f"--output {output}: cannot be written: {error}") from error
