"""`python -m headstart.kernels.cpu`: compile the CPU kernels now, so that nobody waits for it later."""

from .load import loaded

print(f"CPU kernels: {loaded()}")
