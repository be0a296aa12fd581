"""A real server of a tiny model that sees."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import running
from running import Running

from headstart.checkpoint import load_model, load_tokenizer
from vision_models import write_with_tower


@contextmanager
def running_with_tower(
    folder: Path, write: Callable[[Path], Path] = write_with_tower, **options: Any
) -> Iterator[Running]:
    write(folder)
    model, tokenizer = load_model(folder, vision=True), load_tokenizer(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "tiny", lambda head, context: model)
        patch.setattr(running, "folder", lambda head, context: folder)
        patch.setattr(running, "tokenizer", lambda: tokenizer)
        started = running.running(max_sequences=4, **options)
        here = started.__enter__()
    try:  # other servers are not patched
        yield here
    finally:
        started.__exit__(None, None, None)
