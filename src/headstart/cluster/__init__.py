"""One model on several machines, launched together by `mlx.launch`. See docs/cluster.md."""

from .engine import Follower, Leader
from .load import Split, load
from .machines import Machines, join
from .prefix import SharedPrefix

__all__ = ["Follower", "Leader", "Machines", "SharedPrefix", "Split", "join", "load"]
