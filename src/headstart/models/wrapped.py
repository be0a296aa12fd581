"""A model of a family that is not ours: mlx-lm's own forward, behind the same engine.

mlx-lm's layers are given objects with the interface of its caches. Those of attention write to our KV cache, where
every sequence has its own length, so that sequences batch and rejected drafts cost nothing. Layers that replace their
state (Mamba, convolutions) cannot go back: their sequences batch without drafts. What can do neither runs alone, with
mlx-lm's own caches. Which of these a model can is found out by a trial after it is loaded: what it gives must be what
mlx-lm gives with its own caches.
"""

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes

from ..error_log import LOG
from ..errors import CheckpointError
from ..kernels import Backend
from ..kernels.adapters import ChosenAdapters
from ..kernels.layers import Layer
from ..state import GROUP, Arrays, BatchState, OneSequence
from .family import Family
from .mlx_lm_caches import CachePlan, describe_caches, first_pass, flat, own_bytes, tree_of, trims
from .model import Model, Scores

NEAR = {mx.float32: 1e-3}  # of the norm, how far logits may be from those with mlx-lm's own caches
NEAR_IN_HALF = 0.1
TRIAL = [3, 5, 7, 11, 13, 17, 19, 23, 29]
MOST_CONTEXT = 131072  # tokens, where config.json names no limit
CONTEXT = (
    "max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length", "max_sequence_length",
    "max_context_length", "model_max_length",
)  # fmt: skip


def has_mlx_lm(config: dict[str, Any]) -> bool:
    """Return whether mlx-lm has a model of this `model_type`."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not re.fullmatch(r"[\w-]{1,64}", model_type, re.ASCII):
        return False
    try:
        _get_classes(config)
    except (Exception, SystemExit):  # one of its modules ends the process where a library is missing
        return False
    return True


def wrapped_family(model_type: str) -> Family:
    """Return a family of which nothing is known but its name."""
    return Family(model_type, build=_refuse, text=_refuse, lm_head=_refuse)


def _refuse(what: Any) -> Any:
    raise CheckpointError("only mlx-lm knows the parts of this model")


@dataclass(frozen=True, eq=False)
class WrappedModel(Model):
    """A model that mlx-lm runs. It has no head, and what it gives for hidden states is empty."""

    plan: CachePlan = field(default_factory=CachePlan)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        return ()

    @property
    def has_head(self) -> bool:
        return False

    @property
    def hidden_size(self) -> int:
        return 0

    @property
    def most_sequences(self) -> int | None:
        return None if self.plan.batches else 1

    @property
    def keeps_prefixes(self) -> bool:
        return self.plan.batches

    @property
    def windows(self) -> tuple[tuple[int, int], ...]:
        sizes = ((1 if not self.copies else w, 1 if not self.plan.batches else n) for w, n in self.backend.windows)
        return tuple(dict.fromkeys(sizes))

    @property
    def known_window(self) -> int:
        return super().known_window if self.copies else 1

    @property
    def reading(self) -> Model:
        return self

    def with_one_layer_of_each_kind(self) -> Model:
        return self

    def with_kv_bits(self, bits: int) -> "WrappedModel":
        if bits != 8:
            super().with_kv_bits(bits)  # which is refused
        if not any(leaf.keeps_keys and leaf.arrays for leaf in self.plan.leaves):
            raise CheckpointError(
                f"{self.family.name}: 8-bit KV caches are not available for this model: mlx-lm keeps its state "
                f"({self.plan}). Leave --kv-bits out"
            )
        sizes = [shape[3] for leaf in self.plan.leaves if leaf.keeps_keys for shape, _ in leaf.arrays]
        if odd := next((size for size in sizes if size % GROUP), None):
            raise CheckpointError(
                f"heads of {odd} numbers cannot be kept in 8 bits: they must be a multiple of {GROUP}"
            )
        return replace(self, eight_bit_kv=True)

    def make_state(self, rows: int) -> BatchState:
        if not self.plan.batches:
            return BatchState.empty([OneSequence(make_prompt_cache(self.lm), *own_bytes(self.lm))], rows)
        made = [leaf.state(rows, self.eight_bit_kv) for leaf in self.plan.leaves]
        return BatchState.empty([each for each in made if each is not None], rows)

    # A pass

    def _run_layers(
        self,
        state: BatchState,
        tokens: mx.array,
        certain: int,
        embeddings: mx.array | None,
        adapters: ChosenAdapters | None,
        keep: int | None = None,
        grams: Sequence[mx.array] | None = None,
        *,
        whole: bool = False,
    ) -> Generator[mx.array, None, mx.array]:
        """mlx-lm's layers do not stop between each other. The logits are not computed: nobody asks for them."""
        self._forward(tokens, state)
        yield state.lengths
        return self._no_hidden(tokens)

    def score(self, tokens: mx.array, state: BatchState) -> Scores:
        return Scores(self._no_hidden(tokens), self._forward(tokens, state))

    def proof(self, tokens: mx.array) -> mx.array:
        return self._forward(tokens, self.make_state(1))

    def _no_hidden(self, tokens: mx.array) -> mx.array:
        return mx.zeros((*tokens.shape, 0), self.dtype)

    def _forward(self, tokens: mx.array, state: BatchState) -> mx.array:
        """Run mlx-lm's model over [B, W] tokens → logits [B, W, V]."""
        if not self.plan.batches:
            return self._run_alone(tokens, state)
        mask, held = state.reserve(tokens.shape[1]), iter(state.layers)
        states = [next(held) if leaf.arrays or not leaf.keeps_keys else None for leaf in self.plan.leaves]
        caches = [leaf.cache(each, state.lengths, mask) for leaf, each in zip(self.plan.leaves, states, strict=True)]
        logits: mx.array = self.lm(tokens, cache=tree_of(caches, self.plan.shape))
        for cache, each in zip(caches, states, strict=True):
            if isinstance(each, Arrays):
                each.values = [a for a in cache.cache if a is not None]
        return logits

    def _run_alone(self, tokens: mx.array, state: BatchState) -> mx.array:
        """Take back what was rejected of the last window, and go on from there with mlx-lm's own caches."""
        (own,) = state.layers
        if self.copies and (rejected := own.length - int(state.lengths[0].item())):  # type: ignore[arg-type]
            for cache in flat(own.caches):
                cache.trim(rejected)
            own.length -= rejected
        own.length += tokens.shape[1]
        logits: mx.array = self.lm(tokens, cache=own.caches)
        return logits


def wrap(lm: nn.Module, family: Family, config: dict[str, Any], dtype: mx.Dtype, backend: Backend) -> WrappedModel:
    """Return a model of mlx-lm's that is still to be tried. `config`: config.json's text part."""
    logits, caches = first_pass(lm)
    shape = {"vocab_size": logits.shape[-1], "max_position_embeddings": context_length(config)}
    plan = describe_caches(caches)
    model = WrappedModel(family, {**config, **shape}, lm, lm, dtype, backend.around(), plan=plan)  # type: ignore[arg-type]
    return replace(model, copies=plan.copies)


def tried(model: WrappedModel) -> WrappedModel:
    """Return a loaded model with the most capable plan whose logits are mlx-lm's."""
    described, eight_bits = model.plan, model.eight_bit_kv
    model = replace(model, eight_bit_kv=False)  # which rounds
    plans = [replace(described, copies=copies) for copies in dict.fromkeys((described.copies, False))]
    problem: str | None = described.reason
    for plan in plans if described.batches else []:
        candidate = replace(model, plan=plan, copies=plan.copies)
        if (problem := problem_with(candidate)) is None:
            return replace(candidate, eight_bit_kv=eight_bits)
    alone = CachePlan(copies=trims(model.lm), reason=problem or "")
    LOG.info("%s: %s", model.family.name, alone.reason)
    model = replace(model, plan=alone, copies=alone.copies)
    return model.with_kv_bits(8) if eight_bits else model  # which is refused


def problem_with(model: WrappedModel) -> str | None:
    """Return what is wrong with how a model is run in batches, None if nothing is."""
    tokens = [token % model.vocabulary for token in TRIAL]
    near = NEAR.get(model.dtype, NEAR_IN_HALF)
    lengths, width = (5, 2), 3 if model.copies else 1
    try:
        batch: BatchState | None = None
        for length in lengths:
            state = model.make_state(1)
            model._forward(mx.array([tokens[:length]]), state)
            state.commit(mx.array([length], mx.int32), length)
            if batch is None:
                batch = state
            else:
                batch.join(state)
        assert batch is not None
        if width > 1:  # what was rejected leaves no trace
            model._forward(mx.array([tokens[:width]] * len(lengths)), batch)
        windows = [tokens[length : length + width] for length in lengths]
        found = model._forward(mx.array(windows), batch)
        for row, length in enumerate(lengths):
            caches = make_prompt_cache(model.lm)
            model.lm(mx.array([tokens[:length]]), cache=caches)
            expected = [model.lm(mx.array([[each]]), cache=caches)[0, 0] for each in windows[row]]
            if not _is_near(found[row], mx.stack(expected), near):
                return "its logits are not those with mlx-lm's own caches"
    except Exception as error:  # whatever mlx-lm's layers do with a cache that is not theirs
        return f"its layers do not take our caches ({type(error).__name__}: {error})"
    return None


def _is_near(found: mx.array, expected: mx.array, near: float) -> bool:
    found, expected = found.astype(mx.float32), expected.astype(mx.float32)
    return float(mx.linalg.norm(found - expected)) <= near * float(mx.linalg.norm(expected))


def context_length(config: dict[str, Any]) -> int:
    """Return how many tokens config.json says that a text may have."""
    found = (config.get(name) for name in CONTEXT)
    return next((each for each in found if type(each) is int and each > 1), MOST_CONTEXT)
