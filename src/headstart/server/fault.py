"""Unexpected errors: the client learns that there was one, the log where it was raised."""

import logging

from ..engine.log import log_error

LOG = logging.getLogger("headstart.server")


def report(error: BaseException) -> None:
    """Log an unexpected error of a request, without its message, which may quote the prompt."""
    log_error(LOG, "a request failed", error=error)
