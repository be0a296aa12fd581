"""The user's folder for what kernels keep between processes."""

import os
import sys
from pathlib import Path

from ..errors import HeadstartError


class SharedFolderError(HeadstartError):
    """Others may have written what lies in the cache."""


def cache_folder() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "headstart" / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headstart" / "kernels"


def refuse_shared(folder: Path) -> None:
    """Refuse a folder that others may write to: what lies in it decides what is run."""
    status = folder.stat()
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
        raise SharedFolderError(
            f"{folder} belongs to or can be written by others; make it yours alone: chmod 700 {folder}"
        )
