"""`python -m headstart`."""

from .cli.main import app

app()
