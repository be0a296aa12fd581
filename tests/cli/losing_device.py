"""`headstart`, in a process whose device is lost in the middle of its third step.

python losing_device.py once serve …      a process that was started anew keeps its device
python losing_device.py always serve …    it loses that as well
"""

import os
import sys
from typing import Any

import headstart.engine.pending_step
from headstart.cli.main import app
from headstart.cli.serve import RESTARTED
from metal_errors import IGNORED

how = sys.argv.pop(1)
honest, left = headstart.engine.pending_step.step, iter(range(3))


def step(*arguments: Any, **more: Any) -> Any:
    if next(left, None) is None:
        raise RuntimeError(IGNORED)
    return honest(*arguments, **more)


if how == "always" or RESTARTED not in os.environ:
    headstart.engine.pending_step.step = step  # type: ignore[attr-defined]
app()
