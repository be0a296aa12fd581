"""Files that a command writes when it is done, and that are looked at before it begins."""

from pathlib import Path

from ..errors import HeadstartError, RequestError


def check_folders(files: dict[str, Path | str | None]) -> None:
    """Minutes of measuring must not end in a folder that is not there. - is standard output."""
    for option, file in files.items():
        if file is not None and file != "-" and not Path(file).absolute().parent.is_dir():
            raise RequestError(f"{option} {file}: there is no such folder")


def write(path: Path, text: str, option: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise HeadstartError(f"{option} {path}: cannot be written: {error}") from error
