"""One model on several machines, launched together by `mlx.launch`. See docs/guides/cluster.md."""

from .engine import Follower, Leader, SharedPrefix, follow, lead
from .machines import Machines, Split, join_machines, load_part

__all__ = [
    "Follower", "Leader", "Machines", "SharedPrefix", "Split", "follow", "join_machines", "lead", "load_part",
]  # fmt: skip
