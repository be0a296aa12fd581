"""`headstart`, in a process that imports none of the slow libraries before a line comes on standard input."""

import builtins
import sys
from typing import Any

SLOW = {"mlx", "mlx_lm", "transformers"}
honest = builtins.__import__
opened = False


def gate(name: str, *rest: Any, **more: Any) -> Any:
    global opened
    if name.partition(".")[0] in SLOW and not opened:
        assert not SLOW & sys.modules.keys()
        opened = bool(sys.stdin.readline())
    return honest(name, *rest, **more)


builtins.__import__ = gate

from headstart.cli.main import app  # noqa: E402

app()
