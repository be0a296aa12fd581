"""Options that take several values with commas between them."""

from ..errors import RequestError


def listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def whole(text: str, option: str) -> int:
    if not text.isdecimal():
        raise RequestError(f"{option}: {text!r} is not a whole number")
    return int(text)


def numbers(text: str, option: str) -> list[float]:
    try:
        return [float(part) for part in listed(text)]
    except ValueError as error:
        raise RequestError(f"{option} {text}: {error}") from error
