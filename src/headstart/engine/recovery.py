"""The part of an engine that goes on after a failure.

A sequence can always be recomputed from its tokens. So a failure costs time, and at most the answer of one sequence:
of the one that fails, or of the youngest where memory ran out.
"""

import time
from collections import Counter
from dataclasses import dataclass, field

import mlx.core as mx

from ..error_log import LOG, log_error
from ..errors import KernelTimeout
from ..kernels import Backend
from ..state import PrefixCache
from .device_error import is_failed_command, is_out_of_memory, is_timeout, raise_if_lost
from .scheduler import Scheduler
from .sequence import SequenceState, youngest

NARROWEST = 32  # tokens of a pass over a prompt: rows of a tile of MLX's products on Metal
MOST_FAILURES = 6  # of commands, in which a sequence gets no token: passes have their least width after four


@dataclass(frozen=True)
class Trouble:
    """What was recovered from."""

    what: str
    when: float = field(default_factory=time.monotonic)


class Recovery:
    def __init__(self, scheduler: Scheduler, prefix: PrefixCache | None, reader: Backend):
        """`reader`: what reads prompts."""
        self.scheduler = scheduler
        self.prefix = prefix
        self.retries = 0  # decode steps and prefill chunks that failed and were run again
        self.recomputed: Counter[str] = Counter()  # sequences that lost their KV cache, by reason
        self.trouble: Trouble | None = None  # the last
        self.widest_pass = reader.widest  # tokens of a prompt; half as many each time the driver ends a command
        self._narrowest, self._reader = max(NARROWEST, reader.cut or 0), reader
        self.lost_commands = False  # of all engines on the device, until its thread resets it

    def recompute_all(self, reason: str = "restart") -> None:
        """Drop the state of all sequences and prefill their tokens again."""
        for sequence in self.scheduler.prefilling:
            self.recompute(sequence, reason)
        self._recompute_running(self._decoding(), reason)

    def after_step(self, error: Exception) -> None:
        """Recompute all sequences after a step failed: their state on the device is lost.

        If memory ran out, the youngest ends; if a kernel gave up, none. Else each runs alone; then the youngest ends.
        """
        raise_if_lost(error)
        self._reader.recover()
        if is_failed_command(error):
            self._recover_device(error)
            return
        sequences = self._decoding()
        memory, timeout = is_out_of_memory(error), isinstance(error, KernelTimeout)
        if sequences and not timeout and (len(sequences) == 1 or memory or all(each.cleared for each in sequences)):
            last = youngest(sequences)
            last.finish("error", error)
            sequences.remove(last)
        log_error(LOG, "a step failed; %d sequences will be recomputed", len(sequences), error=error)
        self.trouble = Trouble("memory ran out" if memory else "a kernel gave up" if timeout else "a step failed")
        self.retries += bool(sequences)
        for sequence in sequences:
            sequence.suspect = not memory and not timeout and not sequence.cleared
        if memory or timeout:
            self._empty_prefix()
        self._recompute_running(sequences, "memory" if memory else "failure")

    def after_prefill(self, sequence: SequenceState, error: Exception) -> None:
        """End the sequence, or, if memory ran out, free some and start its prefill over.

        The first time the prefix cache is emptied, after that the youngest sequence that holds memory is ended.
        """
        raise_if_lost(error)
        self._reader.recover()
        if is_failed_command(error):
            self._recover_device(error, sequence)
            return
        if not is_out_of_memory(error):
            log_error(LOG, "prefill failed; its request ends with an error", error=error)
            sequence.finish("error", error)
            return
        log_error(LOG, "prefill ran out of memory", error=error)
        self.trouble = Trouble("memory ran out")
        if sequence.retried or not self._empty_prefix():  # a retried sequence has itself filled the cache again
            running, prefilling = self.scheduler.running.sequences, self.scheduler.prefilling
            holding = [*running, *(each for each in prefilling if each.batch)]
            youngest(holding or [sequence]).finish("error", error)
            self.scheduler.running.drop_finished()
        sequence.retried = True
        if not sequence.finished:
            self.retries += 1
            self.recompute(sequence, "memory")

    def _recover_device(self, error: Exception, reading: SequenceState | None = None) -> None:
        """Recompute everything after a command failed, maybe that of the sequence in prefill, maybe another's.

        If memory ran out, the youngest ends. If the driver ended the command, prompts are read in narrower passes;
        they resume from the prefix cache, whose entries were computed before they were stored. Where commands go on
        to fail, a sequence in prefill ends, or the youngest.
        """
        begun = [each for each in self.scheduler.prefilling if each.batch is not None or each is reading]
        present = [each for each in begun if not each.finished] + self._decoding()
        for each in present:
            each.failures += 1
        if present and is_out_of_memory(error):
            self._empty_prefix()
            youngest(present).finish("error", error)
        elif present:
            suspects = [each for each in (*begun, youngest(present)) if each.failures > MOST_FAILURES]
            for each in suspects[:1]:
                each.finish("error", error)
        if is_timeout(error):
            self.widest_pass = max(self.widest_pass // 2, self._narrowest)
        log_error(LOG, "a command failed on the device; %d sequences will be recomputed", len(present), error=error)
        self.retries += bool(present)
        self.trouble = Trouble("a command failed on the device")
        self.lost_commands = True
        self.recompute_all("device")

    def _recompute_running(self, sequences: list[SequenceState], reason: str) -> None:
        self.scheduler.running.clear()
        for sequence in sequences:
            self.recompute(sequence, reason)
        self.scheduler.prefilling.extendleft(reversed(sequences))

    def _decoding(self) -> list[SequenceState]:
        return [sequence for sequence in self.scheduler.running.sequences if not sequence.finished]

    def _empty_prefix(self) -> bool:
        """Empty the prefix cache. Return False if it was empty."""
        if self.prefix is None or not self.prefix.stats().bytes:
            return False
        self.prefix.clear()
        mx.clear_cache()
        return True

    def recompute(self, sequence: SequenceState, reason: str) -> None:
        self.recomputed[reason] += 1
        sequence.reset_prefill()
