"""The user's choice of kernels."""

import os

from ..errors import HeadstartError

VARIABLE = "HEADSTART_KERNELS"


def stock_forced() -> bool:
    """Return whether the user wants stock ops only."""
    choice = os.environ.get(VARIABLE, "auto")
    if choice not in ("", "auto", "stock"):
        raise HeadstartError(f"{VARIABLE} is {choice!r}; set it to 'auto' or 'stock'")
    return choice == "stock"
