"""HTTP in front of the engine room: `app.py` puts the routes together, `openai.py` reads and `reply.py` answers."""

from .app import create_app
from .auth import Keys, check_reach
from .hosts import hosts_for
from .limits import Limits
from .listen import Server, bind, listen
from .log import configure as configure_log
from .pool import most_connections
from .served_model import ServedModel
from .settings import settings_of_the_user

__all__ = [
    "Keys",
    "Limits",
    "ServedModel",
    "Server",
    "bind",
    "check_reach",
    "configure_log",
    "create_app",
    "hosts_for",
    "listen",
    "most_connections",
    "settings_of_the_user",
]
