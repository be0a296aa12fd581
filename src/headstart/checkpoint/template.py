"""Chat templates come with a model, and are programs: they may loop or recurse without end, or fill the memory."""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import CheckpointError, printable_error


def template_problem(tokenizer: TokenizerWrapper) -> str | None:
    """Return why the chat template of a tokenizer cannot be used, if it takes too much for a few words."""
    found = tokenizer.chat_template
    return _try(tuple(found.values()) if isinstance(found, dict) else (found,)) if found else None


def chat_tokens(tokenizer: TokenizerWrapper, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Return a conversation as the model was trained to read it, up to where its answer begins."""
    if not tokenizer.has_chat_template:
        raise CheckpointError("the model's tokenizer has no chat template: use `headstart generate --raw`")
    if problem := template_problem(tokenizer):
        raise CheckpointError(f"the model's chat template is not used: {problem}: use `headstart generate --raw`")
    try:
        # None keeps the template's own default, where mlx-lm's default would turn thinking on.
        return list(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, enable_thinking=None))
    except Exception as error:  # whatever a template does with its input
        raise CheckpointError(f"the model's chat template rejects this: {printable_error(error)}") from error


@cache
def _try(templates: tuple[str, ...]) -> str | None:
    """Render small conversations in a process with limits on time and memory."""
    script = str(Path(__file__).with_name("template_trial.py"))
    done = subprocess.run(
        [sys.executable, "-P", script], input=json.dumps(templates), capture_output=True, text=True, check=False
    )
    if done.returncode == -signal.SIGPROF:
        return "it takes too long for a conversation of a few words"
    return "it ends a process that renders it" if done.returncode < 0 else done.stdout.strip() or None
