"""Options that take several values with commas between them."""

from ..errors import RequestError


def listed(text: str, option: str) -> list[str]:
    """At least one: with none of them nothing would be done, and nobody told."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise RequestError(f"{option} {text!r}: name one or more, with commas between them")
    return parts


def whole(text: str, option: str) -> int:
    if not text.isdecimal():
        raise RequestError(f"{option}: {text!r} is not a whole number")
    return int(text)


def numbers(text: str, option: str) -> list[float]:
    try:
        return [float(part) for part in listed(text, option)]
    except ValueError as error:
        raise RequestError(f"{option} {text}: {error}") from error
