"""Read the JSON files of a checkpoint, which anybody may have written, and the names in them.

What comes from a download is checked here before anything else uses it: a damaged or malicious file is a
CheckpointError that names the file, never a traceback, and never leads out of the model's folder.
"""

import json
import stat
from pathlib import Path, PurePosixPath
from reprlib import repr as shortened
from typing import Any

from ..errors import CheckpointError

MAX_JSON = 100_000_000  # bytes; the safetensors library refuses longer headers too
MAX_DEPTH = 32  # real configs nest four levels deep
MAX_NAME = 1024  # characters of a tensor's or file's name


class Malformed(ValueError):
    """Text that is not the JSON object it must be; the message says where."""


def read_object(file: Path, remedy: str = "Download it again.") -> dict[str, Any]:
    """Return the JSON object in `file`, or raise a CheckpointError. A missing file is a FileNotFoundError."""
    try:
        require_regular(file)
        with file.open("rb") as opened:
            return parse_object(opened.read(MAX_JSON + 1))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror or error}).") from error
    except Malformed as error:
        raise CheckpointError(f"{file}: {error}. {remedy}") from error


def require_regular(file: Path) -> int:
    """Return the size of a regular file, or of what a link leads to. Opening a pipe would wait forever."""
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise Malformed("not a regular file")
    return status.st_size


def parse_object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object in which no key comes twice and nothing is nested too deeply to copy or print."""
    if len(text) > MAX_JSON:
        raise Malformed(f"more than {MAX_JSON:,} bytes of JSON")
    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except UnicodeDecodeError as error:
        raise Malformed(f"not UTF-8 (byte {error.start})") from error
    except RecursionError as error:
        raise Malformed("JSON nested too deeply") from error
    except Malformed:
        raise
    except ValueError as error:
        raise Malformed(f"not JSON ({error})") from error
    if not isinstance(found, dict):
        raise Malformed(f"not a JSON object but {_kind(found)}")
    level: list[Any] = [found]
    for _ in range(MAX_DEPTH):
        level = [each for value in level for each in _children(value)]
        if not level:
            return found
    raise Malformed(f"JSON nested more than {MAX_DEPTH} levels deep")


def checked_name(name: object, what: str) -> str:
    """Return a name that is safe to show; control characters could rewrite a terminal."""
    if not isinstance(name, str):
        raise Malformed(f"{what} is {_kind(name)}, not a name")
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise Malformed(f"{what} {shortened(name)} is empty, too long or not printable")
    return name


def checked_file(name: object, what: str) -> str:
    """Return the name of a file in the model's folder or below it, as a downloaded file gives it.

    Links are followed: the Hugging Face cache is made of them, and no downloaded JSON can create one.
    """
    path = PurePosixPath(checked_name(name, what))
    if path.is_absolute() or ".." in path.parts or "\\" in str(path):
        raise Malformed(f"{what} names {shortened(str(name))}, which is outside the model's folder")
    return str(path)


def describe(error: BaseException) -> str:
    """Return what a library says of an untrusted file: one short line that is safe to show."""
    text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise Malformed(f"{shortened(twice)} comes twice in one JSON object")
    return found


def _children(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")
