"""How a model writes calls and thoughts, as its chat template and its tokenizer tell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mlx_lm.tokenizer_utils import TokenizerWrapper

from .reader import CALL, CALL_END, THINK, THINK_END
from .xml_call import FUNCTION

Format = Literal["xml", "json"]
Thought = Literal["begun", "over", "open"]


@dataclass(frozen=True)
class Dialect:
    format: Format | None  # of calls; None: the template has none that can be read here
    ids: Mapping[str, int]  # of the marks that are one token

    @classmethod
    def of(cls, tokenizer: TokenizerWrapper) -> "Dialect":
        vocabulary = tokenizer.get_vocab()
        marks = (THINK, THINK_END, CALL, CALL_END)
        return cls(_format(_template(tokenizer)), {mark: vocabulary[mark] for mark in marks if mark in vocabulary})

    @property
    def thinks(self) -> bool:
        return THINK in self.ids and THINK_END in self.ids


def thought_in(prompt: Sequence[int], tokenizer: TokenizerWrapper) -> Thought:
    """A template may have begun a thought, or left an empty one behind. Otherwise it is open whether one comes."""
    end = str(tokenizer.decode(list(prompt[-8:]))).rstrip()
    return "begun" if end.endswith(THINK) else "over" if end.endswith(THINK_END) else "open"


def _template(tokenizer: TokenizerWrapper) -> str:
    template = tokenizer.chat_template or ""
    return template if isinstance(template, str) else "\n".join(template.values())


def _format(template: str) -> Format | None:
    if CALL not in template:
        return None
    if FUNCTION in template:
        return "xml"
    return "json" if '"arguments"' in template else None
