"""Where a prompt is cut into chunks for prefill: after so many tokens, and where the model's turn to speak begins.

The next prompt of a conversation repeats this one up to there. What follows may change: templates drop the reasoning
of earlier answers. So the state at that place is what the next turn needs.

Cuts depend on the tokens before them and on the few that mark the turn, not on what the prefix cache holds or on how
the prompt goes on. So prompts are cut alike as far as they agree, and a hit repeats the steps of a miss.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checkpoint.template import template_problem
from ..error_log import LOG, log_error

MIN_TURN = 128  # tokens from one cut at a turn to the next: a short chunk takes longer per token


class TurnMarker(NamedTuple):
    """The tokens that begin the model's turn, or that end the user's, if a template writes nothing between them."""

    tokens: list[int]
    ends: bool = False  # the cut is after them

    @classmethod
    def of(cls, tokenizer: TokenizerWrapper | None) -> "TurnMarker | None":
        """Return what the tokenizer's chat template writes; None if that is not always the same tokens."""
        if tokenizer is None or not tokenizer.has_chat_template:
            return None
        if problem := template_problem(tokenizer):
            LOG.warning("the chat template is not used: %s", problem)
            return None
        user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        try:
            asked = list(tokenizer.apply_chat_template([user], enable_thinking=True))
            begun = [
                list(tokenizer.apply_chat_template([user], add_generation_prompt=True, enable_thinking=thinking))
                for thinking in (True, False)
            ]
            history = list(tokenizer.apply_chat_template([user, answer, user], enable_thinking=True))
        except Exception as error:  # whatever a template does with its input
            log_error(LOG, "the chat template fails; prompts are not cut at turns", error=error)
            return None
        common = [a for a, *others in takewhile(_same, zip(history, *begun, strict=False))]
        if not asked or common[: len(asked)] != asked:
            return None
        header = common[len(asked) :]
        while header and not tokenizer.decode(header[-1:]).strip():  # the tokenizer may join it with what follows
            header.pop()
        if header:
            return cls(header)
        return cls(asked[-1:], ends=True) if asked[-1] in tokenizer.added_tokens_decoder else None

    def find(self, tokens: Sequence[int]) -> Iterator[int]:
        """Yield the positions in `tokens` where the model's turn begins."""
        first, width = self.tokens[0], len(self.tokens)
        at = -1
        while True:
            try:
                at = tokens.index(first, at + 1)
            except ValueError:
                return
            turn = at + width if self.ends else at
            if list(tokens[at : at + width]) == self.tokens and turn < len(tokens):
                yield turn


def _same(tokens: tuple[int, ...]) -> bool:
    return len(set(tokens)) == 1


def chunk_ends(tokens: Sequence[int], marker: TurnMarker | None, chunk: int, cut: int = 1) -> list[int]:
    """Return where the chunks of a prompt end: where a turn begins, at least MIN_TURN tokens after the last one that
    counted, and where `chunk` tokens have passed since the last end. What is left after the last end is shorter.

    Ends are multiples of `cut`, the last before a turn.
    """
    ends, last_turn = [0], 0
    for turn in (*(marker.find(tokens) if marker is not None else ()), len(tokens)):
        if turn - last_turn >= MIN_TURN or turn == len(tokens):
            end = turn if turn == len(tokens) else turn - turn % cut
            ends += [*range(ends[-1] + chunk, end, chunk), end]
            last_turn = turn
    return ends[1:-1]
