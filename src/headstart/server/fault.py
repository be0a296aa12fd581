"""Errors that nobody foresaw. The client learns that there was one, and the log where, but not what was asked."""

import logging
import traceback

LOG = logging.getLogger("headstart")


def report(error: BaseException) -> None:
    """Without the words of the error, which may be the prompt's."""
    LOG.error("a request failed:\n%s", "".join(_told(error)).rstrip())


def _told(error: BaseException) -> list[str]:
    cause = error.__cause__ or error.__context__
    lines = [*_told(cause), "which led to\n"] if cause is not None else []
    lines += [type(error).__name__, "\n", *traceback.format_list(traceback.extract_tb(error.__traceback__))]
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return [*lines, *(line for each in inner for line in _told(each))]
