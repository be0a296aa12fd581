"""An acceptance that is imposed, to study what depth would earn a model whose own head cannot show it.

Random weights of a large model cost what real ones do, but nothing they draft stands. So the greedy text is recorded
first, and then decoded again: the head drafts, at its full cost, and each draft is exchanged on the device for the
recorded token or for a wrong one, as the pattern says. The trunk verifies as always, so the text must come out as it
was recorded; where it does not, the figures would mean nothing, and an error says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..engine.batch import Batch
from ..engine.step import Round, draft, take_in, verify
from ..errors import HeadstartError, RequestError
from ..models import Model
from ..sampling import Proposal
from .run import Run, Running, Watch, in_turns, run

GOLDEN = 0.6180339887498949  # its multiples spread evenly: few rounds suffice to follow the pattern


@dataclass(frozen=True)
class Recording:
    """What a model says greedily after some prompts, without drafts."""

    prompts: Sequence[Sequence[int]]
    texts: list[list[int]]


def record(model: Model, prompts: Sequence[Sequence[int]], tokens: int) -> Recording:
    return Recording(prompts, run(model, prompts, 0, tokens).texts)


def check_pattern(pattern: Sequence[float]) -> None:
    """Cumulative: of all rounds, the share that accepts at least one draft, at least two, and so on."""
    falling = all(a >= b for a, b in zip([1.0, *pattern], [*pattern, 0.0], strict=True))
    if not pattern or not falling:
        shares = ", ".join(f"{share:g}" for share in pattern)
        raise RequestError(
            f"--acceptance {shares}: give the share of rounds that accept at least 1, 2, … drafts, from 1 to 0 and "
            "never rising, such as .88,.75,.62"
        )


def run_imposed(model: Model, recording: Recording, k: int, pattern: Sequence[float]) -> Run:
    """One run, with nobody to take turns with."""
    return in_turns({k: begin_imposed(model, recording, k, pattern)})[k]


def begin_imposed(model: Model, recording: Recording, k: int, pattern: Sequence[float]) -> Running:
    """Decode the recording again with k drafts a round, accepted by the pattern. Counted as in `run`."""
    check_pattern(pattern)
    if k > len(pattern):
        raise RequestError(f"--acceptance has {len(pattern)} positions, and k is {k}: give {k} of them")
    rows, limit = len(recording.prompts), len(recording.texts[0])
    running = take_in(model, recording.prompts, ceiling=k, limit=limit)
    script = _script(recording, k)
    said: list[list[int]] = [[] for _ in range(rows)]
    rounds: list[tuple[int, int]] = []
    first, begun, ended = 0, 0.0, 0.0
    watch = Watch()
    flight = _launch(model, running, k, pattern, script)
    while not ended:
        following = _launch(model, running, k, pattern, script)  # the host is one step ahead, as in the engine
        report: list[list[int]] = flight.tolist()  # type: ignore[assignment]
        for row, (*tokens, accepted, proposed) in enumerate(report):
            running.rows.bounds[row] -= k - accepted
            said[row] += tokens[: accepted + 1]
            rounds.append((accepted, proposed))
        if over := watch.turn_is_over:
            mx.eval(following)
        now = watch.read()
        if not begun:
            begun, first = now, sum(map(len, said))
            rounds.clear()
        elif any(len(text) >= limit for text in said):
            ended = now
        if over and not ended:
            yield min(map(len, said)) / limit
            watch.go_on(now)
        flight = following
    mx.eval(flight)
    for row, (text, expected) in enumerate(zip(said, recording.texts, strict=True)):
        _check_same(text, expected[: len(text)], row, k)
    return Run(sum(map(len, said)) - first, ended - begun, rounds, said)


def _launch(model: Model, running: Batch, k: int, pattern: Sequence[float], script: mx.array) -> mx.array:
    """One step on its way → [B, k+3]: tokens, accepted, proposed."""
    drafted = draft(model, running, k)
    round: Round = verify(model, running, impose(drafted, running, pattern, script, model.vocabulary))
    report = mx.concatenate([round.tokens, mx.stack([round.accepted, round.proposed], axis=1)], axis=1)
    mx.async_eval(report, *running.arrays())
    return report


def impose(
    drafted: Proposal, running: Batch, pattern: Sequence[float], script: mx.array, vocabulary: int
) -> Proposal:
    """The script's tokens as far as this round accepts, wrong ones after them. `script` [B, S]: prompt and text."""
    k = drafted.tokens.shape[1]
    if k == 0:
        return drafted
    turns = (running.rounds + 1) * GOLDEN + mx.arange(running.size) * GOLDEN**2
    chance = turns - mx.floor(turns)  # [B], evenly over 0..1
    stand = chance[:, None] < mx.array(list(pattern[:k]))  # [B, k]
    at = running.scene().position[:, None] + mx.arange(k)
    right = mx.take_along_axis(script, mx.minimum(at, script.shape[1] - 1), axis=1)
    tokens = mx.where(stand, right, (right + 1) % vocabulary)
    # No draft is negative, so none is taken; but the device cannot know, and must wait for the head as ever.
    return Proposal(mx.where(drafted.tokens < 0, drafted.tokens, tokens), [])


def _script(recording: Recording, k: int) -> mx.array:
    lines = [[*prompt, *text] for prompt, text in zip(recording.prompts, recording.texts, strict=True)]
    longest = max(map(len, lines)) + k
    return mx.array([line + [0] * (longest - len(line)) for line in lines], mx.int32)


def _check_same(text: list[int], expected: list[int], row: int, k: int) -> None:
    if text != expected:
        at = next(i for i, (a, b) in enumerate(zip(text, expected, strict=True)) if a != b)
        raise HeadstartError(
            f"--acceptance: at k = {k}, row {row} says token {text[at]} at position {at} where {expected[at]} was "
            "recorded, so no acceptance can be imposed. The kernels of this device compute a window otherwise than a "
            "single token: `headstart probe` measures it"
        )
