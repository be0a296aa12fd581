"""The sequences that decode together: what the host knows of them, and the batch that the device holds, in one
order."""

import mlx.core as mx

from ..models import Model
from .batch import Batch
from .pending_step import PendingStep
from .sequence import SequenceState, youngest


class Running:
    def __init__(self, model: Model):
        self.model = model
        self.sequences: list[SequenceState] = []
        self.batch: Batch | None = None
        self.pending: PendingStep | None = None  # launched, or about to be, and not read yet
        self.steady = False  # the next step follows the last without other device work

    def join(self, sequence: SequenceState) -> None:
        """Add a prefilled sequence and its siblings."""
        assert sequence.batch is not None
        sequences = sequence.fork()
        if len(sequences) > 1:
            sequence.batch.fork([each.params for each in sequences], self.model)
        if self.batch is None:
            self.batch = sequence.batch
        else:
            self.batch.join(sequence.batch, self.model)
        sequence.batch = None
        self.sequences += sequences
        self.steady = False

    def drop_finished(self) -> None:
        self._keep([i for i, sequence in enumerate(self.sequences) if not sequence.finished])

    def remove_youngest(self) -> SequenceState:
        last = youngest(self.sequences)
        self._keep([i for i, sequence in enumerate(self.sequences) if sequence is not last])
        return last

    def clear(self) -> None:
        """Forget all sequences, and what the device holds of them."""
        self.sequences, self.batch, self.pending, self.steady = [], None, None, False
        mx.clear_cache()

    def lengths(self, ahead: int) -> list[int]:
        """Return the length of each sequence after `ahead` more tokens."""
        return [bound + ahead for bound in self.batch.trunk_state.bounds] if self.batch is not None else []

    def correct_length(self, sequence: SequenceState, rejected: int) -> None:
        """Take back what `commit` counted as if all drafts were accepted."""
        if self.batch is not None and sequence in self.sequences:
            self.batch.trunk_state.bounds[self.sequences.index(sequence)] -= rejected

    def _keep(self, staying: list[int]) -> None:
        if self.batch is None or len(staying) == len(self.sequences):
            return
        self.sequences = [self.sequences[i] for i in staying]
        self.steady = False
        if staying:
            self.batch.keep(staying, self.model)
        else:
            self.batch = None
