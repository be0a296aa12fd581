"""From what the user typed to the tokens that the model reads."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CheckpointError, RequestError

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper


def read_text(prompt: str | None, file: str | None) -> str:
    """The prompt itself, or the contents of a file, `-` being standard input."""
    if (prompt is None) == (file is None):
        raise RequestError("give the prompt with either --prompt or --prompt-file (- for standard input)")
    try:
        if file is not None:
            prompt = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        assert prompt is not None
        prompt.encode()
    except (OSError, UnicodeError) as error:
        raise RequestError(f"--prompt{'-file ' + file if file else ''}: cannot be read as text: {error}") from error
    if not prompt:
        raise RequestError(f"{'--prompt-file ' + file if file else '--prompt'} is empty: say what to write")
    return prompt


def chat_tokens(tokenizer: "TokenizerWrapper", messages: list[dict[str, str]]) -> list[int]:
    """The conversation as the model was trained to read it, up to where its answer begins."""
    if not tokenizer.has_chat_template:
        raise CheckpointError("the model's tokenizer has no chat template: use `headstart generate --raw`")
    # None is neither yes nor no, so that the template's own default holds. mlx-lm would say yes.
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=None))
