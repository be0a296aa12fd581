"""Many sequences of few requests through the engine's own step, and the exact law of their first tokens.

A prompt is taken in once, by the engine; its row is then copied as often as there are samples wanted, each copy with
a key of its own. So thousands of samples take a few steps, in batches that mix every request with every other.
"""

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
import numpy as np

from checkpoints import write, write_drafter
from fixtures import by_backend
from headstart.checkpoint import load_model
from headstart.engine import Engine, Request
from headstart.engine.batch import Batch
from headstart.engine.step import StepResult, step
from headstart.models import Model
from headstart.sampling import SamplingParams, SequenceParams, controls
from headstart.sampling.distribution import process_logits, sampling_distribution
from headstart.state import BatchState

LENGTH = 3  # tokens of an answer that are looked at


@dataclass(frozen=True)
class Case:
    params: SamplingParams
    ceiling: int  # drafts a round
    keys: Sequence[int]  # one sample each


@by_backend
def small_model(vocabulary: int = 12, seed: int = 3, block: bool = False) -> Model:
    """Two random layers, one recurrent and one of attention, with a head, and logits flat enough to sample from.

    `block`: the same model with a block drafter.
    """
    sizes = {
        "vocab_size": vocabulary, "num_hidden_layers": 2, "full_attention_interval": 2, "hidden_size": 32,
        "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }  # fmt: skip
    with TemporaryDirectory() as folder:
        target = write(Path(folder, "target"), "dense", seed=seed, **sizes)
        drafter = write_drafter(Path(folder, "drafter"), target, layers=(0, 1)) if block else None
        model = load_model(target, drafter=drafter, dtype=mx.float32)
    lm_head = model.lm.language_model.lm_head
    lm_head.weight = lm_head.weight * 0.16
    return model


def exact_law(model: Model, prompt: Sequence[int], params: SamplingParams, length: int = LENGTH) -> np.ndarray:
    """[V, V, …]: of the first tokens, from mlx-lm's own forward over every prefix."""
    V = model.vocabulary
    every = np.array(list(itertools.product(range(V), repeat=length - 1)), np.int32).reshape(-1, length - 1)
    texts = np.concatenate([np.tile(np.array(prompt, np.int32), (len(every), 1)), every], axis=1)
    logits = model.lm(mx.array(texts))[:, -length:]  # [N, length, V]: after each prefix
    ruled = controls([SequenceParams(params, 0, 0, 100)], V)
    size = max(params.context_size, 1)
    law = np.ones(())
    for n in range(length):
        lines = np.arange(0, len(every), V ** (length - 1 - n))  # one of the texts that share a prefix of n tokens
        padded = np.concatenate([np.full((len(lines), size), -1), texts[lines][:, : len(prompt) + n]], axis=1)
        seen = mx.array(padded[:, -size:].astype(np.int32))[None]
        counts = (every[lines][:, :n, None] == np.arange(V)).sum(axis=1)  # [N, V], of what was generated
        remaining = mx.full((1, len(lines)), 100 - n)
        window = process_logits(
            logits[mx.array(lines), n][None], ruled, seen, remaining, mx.array(counts[None], mx.float32)
        )
        p = np.array(sampling_distribution(window, ruled, None).dense(V)[0], np.float64)
        law = law[..., None] * (p / p.sum(axis=-1, keepdims=True)).reshape(*law.shape, V)
    return law


def first_tokens(
    model: Model,
    prompt: Sequence[int],
    cases: Sequence[Case],
    rows: int = 3000,
    run: Callable[[Model, Batch, int], StepResult] = step,
) -> list[np.ndarray]:
    """[samples, LENGTH] for each case. A batch holds samples of every case, one after the other."""
    engine = Engine(model, max_sequences=len(cases))
    for case in cases:
        engine.submit(Request(prompt, replace(case.params, k=case.ceiling, max_tokens=40)))
    engine.scheduler.admit()
    while engine.scheduler.prefilling:
        engine.reader.read_pass()
    taken = engine.scheduler.running.batch
    assert taken is not None

    order = [(n, key) for keys in itertools.zip_longest(*[c.keys for c in cases]) for n, key in enumerate(keys)]
    order = [(n, key) for n, key in order if key is not None]
    found: list[list[np.ndarray]] = [[] for _ in cases]
    for start in range(0, len(order), rows):
        here = order[start : start + rows]
        batch = copied(taken)
        batch.keep([n for n, _ in here], model)
        batch.params = [asked._replace(key=key) for asked, (_, key) in zip(batch.params, here, strict=True)]
        batch.controls = controls(batch.params, model.vocabulary)
        for (n, _), tokens in zip(here, said(model, batch, max(c.ceiling for c in cases), run), strict=True):
            found[n].append(tokens)
    return [np.stack(samples) for samples in found]


def said(model: Model, batch: Batch, k: int, run: Callable[[Model, Batch, int], StepResult]) -> np.ndarray:
    """[B, LENGTH]: run until every sequence has generated so many."""
    tokens = np.zeros((batch.size, LENGTH + k + 1), np.int32)
    count = np.zeros(batch.size, int)
    while count.min() < LENGTH:
        round = run(model, batch, k)
        mx.eval(round.verdict.tokens, round.verdict.accepted, batch.arrays())
        new, more = np.array(round.verdict.tokens), np.array(round.verdict.accepted) + 1
        for i in range(k + 1):
            here = np.flatnonzero((i < more) & (count + i < LENGTH))
            tokens[here, count[here] + i] = new[here, i]
        count += more
    return tokens[:, :LENGTH]


def copied(batch: Batch) -> Batch:
    def rows(memory: BatchState) -> BatchState:
        return replace(memory, layers=[copy.copy(layer) for layer in memory.layers], bounds=list(memory.bounds))

    head = rows(batch.head_state) if batch.head_state is not None else None
    return replace(batch, trunk_state=rows(batch.trunk_state), head_state=head, params=list(batch.params))
