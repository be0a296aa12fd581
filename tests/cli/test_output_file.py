"""Files that a command writes at its end are looked at before minutes are spent on what goes into them."""

from pathlib import Path

import pytest

from disks import read_only_folder
from headstart.cli.show import check_output
from headstart.errors import RequestError


def test_what_cannot_be_written_is_named_before_the_work(tmp_path: Path) -> None:
    check_output(tmp_path / "new.md")
    check_output(None)
    with pytest.raises(RequestError, match=f"--output {tmp_path}: cannot be written. Name a file"):
        check_output(tmp_path)
    with read_only_folder(tmp_path / "sealed") as sealed, pytest.raises(RequestError, match="cannot be written"):
        check_output(sealed / "report.json")
