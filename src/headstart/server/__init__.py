"""The HTTP server: `app.py` has the routes, `request_handler.py` follows a request from its body to its response."""

from .access import Keys, check_reach, hosts_for
from .app import create_app
from .connection import connection_limit
from .limits import Limits
from .listen import Server, bind, listen
from .log import configure_log
from .served_model import ServedModel
from .settings import user_settings_file

__all__ = [
    "Keys",
    "Limits",
    "ServedModel",
    "Server",
    "bind",
    "check_reach",
    "configure_log",
    "connection_limit",
    "create_app",
    "hosts_for",
    "listen",
    "user_settings_file",
]
