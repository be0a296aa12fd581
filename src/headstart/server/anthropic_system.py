"""System messages in the middle of a conversation, as Claude Code sends them, for templates that know only one."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from mlx_lm.tokenizer_utils import TokenizerWrapper

_WORD = "perhaps"


def late_system(messages: Sequence[Mapping[str, Any]]) -> bool:
    return any(message["role"] == "system" for message in messages[1:])


def takes_late_system(tokenizer: TokenizerWrapper) -> bool:
    """Whether the template writes such a message down. Qwen3.5's refuses it, and others may leave it out."""
    roles = ("system", "user", "assistant", "system", "user")
    talk = [{"role": role, "content": _WORD} for role in roles]
    try:
        return str(tokenizer.apply_chat_template(talk, tokenize=False)).count(_WORD) == len(roles)
    except TemplateError:
        return False


def as_the_users(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The late ones said by the user. They stay where they are: further in front they would change what comes before
    them, and no prompt would go on from the one before."""
    late = [{**message, "role": "user"} if message["role"] == "system" else message for message in messages[1:]]
    return [*messages[:1], *late]
