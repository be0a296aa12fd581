"""An imposed acceptance: the pattern is followed, the head still works, and the text is the recorded one."""

from pathlib import Path

import mlx.core as mx
import pytest

from bench.imposed_acceptance import Recording, check_pattern, decode_imposed, record, replace_drafts
from fixtures import mlx_lm_greedy, random_model, random_prompt
from headstart.engine.draft import head_drafts as draft
from headstart.engine.step import prefill_prompts
from headstart.errors import HeadstartError, RequestError

PATTERN = (0.88, 0.75, 0.62)


@pytest.fixture(scope="module")
def recording() -> Recording:
    model = random_model()
    return record(model, [random_prompt(model, length, seed=length) for length in (3, 9, 1)], tokens=60)


def test_a_recording_is_what_plain_decoding_generates(recording: Recording) -> None:
    for prompt, text in zip(recording.prompts, recording.texts, strict=True):
        assert text == mlx_lm_greedy(random_model(), prompt, 60)


def test_acceptance_follows_the_pattern_and_not_the_head(recording: Recording) -> None:
    done = decode_imposed(random_model(), recording, 3, PATTERN)
    shares = [accepted / proposed for accepted, proposed in zip(done.accepted, done.proposed, strict=True)]
    assert shares == pytest.approx(PATTERN, abs=0.08)
    assert done.tokens_per_round == pytest.approx(1 + sum(PATTERN), rel=0.06)
    assert done.seconds > 0


@pytest.mark.parametrize(("pattern", "per_round"), [((1.0, 1.0), 3.0), ((0.0, 0.0), 1.0), ((1.0, 0.0), 2.0)])
def test_all_none_and_one_of_two(recording: Recording, pattern: tuple[float, ...], per_round: float) -> None:
    done = decode_imposed(random_model(), recording, 2, pattern)
    assert done.tokens_per_round == pytest.approx(per_round, rel=0.02)
    longest = max(map(len, done.sequences))
    assert longest == 60
    for text, recorded in zip(done.sequences, recording.texts, strict=True):
        assert text == recorded[: len(text)]


def test_zero_drafts_is_plain_decoding(recording: Recording) -> None:
    done = decode_imposed(random_model(), recording, 0, PATTERN)
    assert (done.sequences, done.tokens_per_round) == (recording.texts, 1.0)


def test_the_trunk_waits_for_the_drafts_that_are_exchanged(recording: Recording, tmp_path: Path) -> None:
    """Otherwise the device would leave out the head's last logits, and drafts would seem cheaper than they are."""
    model = random_model()
    running = prefill_prompts(model, recording.prompts, max_k=2)
    drafted = draft(model, running, 2)
    exchanged = replace_drafts(drafted, mx.zeros((3, 2), mx.int32)).tokens
    mx.export_to_dot(str(tmp_path / "graph.dot"), exchanged)
    assert (tmp_path / "graph.dot").read_text().count("ArgReduce") == 2  # a draft each
    assert exchanged.tolist() == [[0, 0]] * 3


def test_text_that_does_not_come_out_as_recorded_is_an_error(recording: Recording) -> None:
    texts = [list(text) for text in recording.texts]
    texts[1][20] = (texts[1][20] + 1) % random_model().vocabulary
    with pytest.raises(
        HeadstartError, match=r"at k = 3, sequence 1 has token .* at position 20 where .* was recorded"
    ):
        decode_imposed(random_model(), Recording(recording.prompts, texts), 3, PATTERN)


@pytest.mark.parametrize("pattern", [(), (0.5, 0.6), (1.1,), (0.5, -0.1)])
def test_a_pattern_that_is_none_is_refused(pattern: tuple[float, ...]) -> None:
    with pytest.raises(RequestError, match=r"acceptance .*give 1 shares"):
        check_pattern(pattern, 1)


def test_a_pattern_shorter_than_the_depth_is_refused(recording: Recording) -> None:
    with pytest.raises(RequestError, match=r"acceptance 0\.88, 0\.75, 0\.62: give 4 shares"):
        decode_imposed(random_model(), recording, 4, PATTERN)
