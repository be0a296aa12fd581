"""System messages beside the first, as agents send them, for templates that know only one."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError
from mlx_lm.tokenizer_utils import TokenizerWrapper

Messages = Sequence[Mapping[str, Any]]

_WORD = "perhaps"


def has_several(messages: Messages) -> bool:
    return any(map(_is_system, messages[1:]))


def takes_several(tokenizer: TokenizerWrapper) -> bool:
    """Whether the template writes them down where they are. Qwen3.5's refuses them, and others may leave them out."""
    roles = ("system", "user", "assistant", "system", "user")
    talk = [{"role": role, "content": _WORD} for role in roles]
    try:
        return str(tokenizer.apply_chat_template(talk, tokenize=False)).count(_WORD) == len(roles)
    except TemplateError:
        return False


def with_one(messages: Messages) -> tuple[Messages, bool]:
    """Those at the beginning made one, and late ones said by the user; and whether there were late ones. They stay
    where they are: further in front they would change what comes before them, and no prompt would go on from the one
    before."""
    first = list(takewhile(_is_system, messages))
    joined = [{**first[0], "content": "\n\n".join(each["content"] for each in first)}] if first else []
    others = messages[len(first) :]
    reworded = [{**each, "role": "user"} if _is_system(each) else each for each in others]
    return [*joined, *reworded], any(map(_is_system, others))


def _is_system(message: Mapping[str, Any]) -> bool:
    return bool(message["role"] == "system")
