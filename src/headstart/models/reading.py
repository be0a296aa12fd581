"""What reads prompts for a model: another backend than decodes, where there is one and it passes a check."""

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import mlx.core as mx

from ..error_log import LOG, log_error

if TYPE_CHECKING:
    from .model import Model

NEAR = 0.2  # of the norm, how far hidden states may be from those of decoding: kernels round, and experts change


def reader_of(model: "Model") -> "Model":
    """Return the model as it reads prompts: itself, or with the backend that does that for its backend."""
    backend = model.backend.reader(model.layers, model.dtype) if model.share.ranks == 1 else model.backend
    if backend is model.backend:
        return model
    reading = replace(model, backend=backend)
    reading.__dict__["layers"] = model.layers  # in place of what the cached property would find
    short, decoding = reading.with_one_layer_of_each_kind(), model.with_one_layer_of_each_kind()
    try:
        with model.backend.compiling(model.dtype):
            problem = _problem(short, decoding)
    except Exception as error:
        log_error(LOG, "kernels for prompts failed; those of decoding read them", error=error)
        return model
    if problem:
        LOG.warning("kernels for prompts %s; those of decoding read them", problem)
        return model
    return reading


def _problem(reading: "Model", decoding: "Model") -> str | None:
    """Return what is wrong with how prompts are read."""
    cut = reading.backend.cut or 64
    length = 2 * cut + 5
    whole, expected = _hidden(reading, [length]), _hidden(decoding, [length])
    if reading.backend.cut and not mx.array_equal(whole, _hidden(reading, [cut, length])):
        return "round otherwise where a prompt is cut"
    difference = float(mx.linalg.norm(whole - expected)) / float(mx.linalg.norm(expected))
    return None if difference < NEAR else "compute something else than those of decoding"


def _hidden(model: "Model", ends: list[int]) -> mx.array:
    """Return the hidden states of a prompt that is read in passes to these ends."""
    tokens, state, made = (mx.arange(ends[-1])[None] * 37 + 11) % model.vocabulary, model.make_state(1), []
    for begin, end in pairwise([0, *ends]):
        made.append(model.trunk(tokens[:, begin:end], state, end - begin).astype(mx.float32))
        state.commit(mx.full((1,), end - begin, mx.int32), most=end - begin)
    return mx.concatenate(made, axis=1)
