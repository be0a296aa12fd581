"""Follow one sequence through its grammar: which tokens may come next, also after drafts, and when it ends.

A matcher of llguidance's never leaves an error. One that drafts have taken to a limit is replaced by a new one, which
consumes the sequence's tokens again: only generated tokens end a sequence with such an error.
"""

import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from llguidance import LLMatcher

from ..errors import GrammarLimit, HeadstartError

if TYPE_CHECKING:
    from .grammar import Grammar

MASK_SECONDS = 1.0  # CPU time for one mask. Ordinary masks take milliseconds, and the whole batch waits for each.
RENEWALS = 8  # of a sequence's lexer: each may take as long as to compile the grammar


class Matcher:
    """Follows one sequence through its grammar."""

    def __init__(self, grammar: "Grammar", stop_ids: Collection[int], vocabulary: int):
        self._grammar = grammar
        self._start = grammar.start
        self._matcher = grammar.start.deep_copy()
        self._stop_ids = frozenset(stop_ids)
        self._mask_bytes = (vocabulary + 7) // 8
        self._tokens: list[int] = []  # consumed
        self._renewals = 0
        self._limited = False  # a mask of the window is missing because of an error
        self.stopped = False  # the grammar is complete, and nothing can follow
        self.failed: HeadstartError | None = None

    def forced(self, most: int) -> list[int]:
        """Return the next tokens, at most `most`, that the grammar leaves no choice about."""
        tokens = self._matcher.compute_ff_tokens()[:most]
        end = next((i for i, token in enumerate(tokens) if token in self._stop_ids), None)
        return tokens[:end]

    def masks(self, drafts: Sequence[int]) -> list[bytes]:
        """Return the permitted tokens before each draft and after the last, as bit masks over the vocabulary.

        Masks end at a draft that is forbidden or ends the answer, where no token is permitted, and where a limit is
        met. If the answer meets it too, `advance` says so.
        """
        masks, error = self._look_ahead(drafts)
        if self._recover(error):
            masks, error = self._look_ahead(drafts)
            self._recover(error)
        if error is not None and not masks:
            raise error
        self._limited = error is not None
        return masks if masks[-1].strip(b"\0") else masks[:-1]

    def advance(self, tokens: Sequence[int]) -> int:
        """Consume generated tokens and return how many are part of the answer.

        Tokens after the one that completes the grammar are not, nor those from one that breaks it on. A token breaks
        it only if no token was permitted, or a limit is met; then `failed` says why.
        """
        limited = self._limited
        for index, token in enumerate(tokens):
            if limited and not self._has_mask():
                return index
            if token not in self._stop_ids:
                if not self._consume(token):
                    return index
                if not self._matcher.is_stopped():
                    continue
            if self._matcher.is_accepting():
                self.stopped = True
                return index + 1
            self.failed = _error(self._matcher)
            return index
        return len(tokens)

    def _has_mask(self) -> bool:
        """Return whether a mask can be computed; otherwise `failed` says why not."""
        try:
            self.masks([])
        except HeadstartError as error:
            self.failed = error
        return self.failed is None

    def _look_ahead(self, drafts: Sequence[int]) -> tuple[list[bytes], HeadstartError | None]:
        """Return the masks, and the error that ended them early. The drafts are taken back, unless that fails."""
        ahead = self._matcher if self._grammar.rolls_back else self._matcher.deep_copy()
        masks: list[bytes] = []
        consumed = 0
        error: HeadstartError | None = None
        try:
            masks.append(self._mask(ahead))
            for draft in drafts:
                permitted = masks[-1][draft // 8] >> draft % 8 & 1
                if draft in self._stop_ids or not permitted or not _step(ahead, draft):
                    break
                consumed += 1
                masks.append(self._mask(ahead))
        except HeadstartError as found:
            error = found
        if not ahead.is_error() and ahead is self._matcher:
            ahead.rollback(consumed)
        return masks, _error(ahead) if ahead.is_error() else error

    def _mask(self, matcher: LLMatcher) -> bytes:
        start = time.thread_time()
        mask = bytearray(matcher.compute_bitmask()[: self._mask_bytes])
        if time.thread_time() - start > MASK_SECONDS:
            raise GrammarLimit(f"grammar: finding the next tokens took more than {MASK_SECONDS:g} s: simplify it")
        if matcher.is_error():
            raise _error(matcher)
        mask += bytes(self._mask_bytes - len(mask))  # a model may have more ids than its tokenizer: they have no text
        may_end = matcher.is_accepting()
        if not may_end and len(mask) - mask.count(0) == 1:
            self._permit_text(mask, matcher)
        for token in self._stop_ids:
            bit = 1 << token % 8
            mask[token // 8] = mask[token // 8] | bit if may_end else mask[token // 8] & ~bit
        return bytes(mask)

    def _permit_text(self, mask: bytearray, matcher: LLMatcher) -> None:
        """Permit the first token of a text that the grammar forces and that is also the text of an added token.

        llguidance tokenises such a text as the added token, permits that alone, and then refuses it.
        """
        tokenizer = self._grammar.tokenizer
        last = len(mask.rstrip(b"\0")) - 1
        token = 8 * last + mask[last].bit_length() - 1
        if tokenizer.is_special_token(token) and not matcher.validate_tokens([token]):
            first = tokenizer.greedy_tokenize(tokenizer.decode_str([token]))[0]
            mask[last] = 0
            mask[first // 8] |= 1 << first % 8

    def _consume(self, token: int) -> bool:
        """Consume a generated token. Return whether that is possible; otherwise `failed` says why not."""
        if not _step(self._matcher, token):
            error = _error(self._matcher)
            if not self._recover(error) or not _step(self._matcher, token):
                self.failed = error
                return False
        self._tokens.append(token)
        return True

    def _recover(self, error: HeadstartError | None) -> bool:
        """Return to the state after the consumed tokens, if an error has left it. Return whether with a new lexer.

        A lexer that has met a limit fails for all sequences that share it, and after any tokens. The error is a
        sequence's own only if a new lexer meets the limit too.
        """
        renewed = error is not None and _is_of_lexer(error) and self._renewals < RENEWALS
        if renewed:
            self._renewals += 1
            self._start = self._grammar.renew()
        if renewed or self._matcher.is_error():
            self._matcher = self._start.deep_copy()
            for token in self._tokens:
                _step(self._matcher, token)
        return renewed


def _step(matcher: LLMatcher, token: int) -> bool:
    """Consume a token as if its mask had been computed before, which reads the text that the grammar forces: that
    decides from where `max_tokens=` counts, and which limits are met."""
    matcher.compute_ff_bytes()
    return matcher.consume_token(token)


def _error(matcher: LLMatcher) -> HeadstartError:
    reason = brief(matcher.get_error() or matcher.stop_reason())
    if meets_limit(reason):
        return GrammarLimit(f"grammar: a limit of the grammar library was met: {reason}: simplify the grammar")
    return HeadstartError(f"grammar: no token can follow the generated text: {reason}")


def _is_of_lexer(error: HeadstartError) -> bool:
    return isinstance(error, GrammarLimit) and ": lexer error:" in str(error)


def meets_limit(reason: str) -> bool:
    """Return whether llguidance's error is a limit of its own, not a token that the grammar does not permit."""
    return reason.startswith(("lexer error:", "parser error:", "Parser Error: Current row has"))


def brief(reason: str) -> str:
    """Return llguidance's message without its placeholder for internal state, and where its code was."""
    return reason.partition("<backtrace>")[0].replace("<non-verbose/>", "").strip()
