"""Stop strings, wherever they fall, and log-probabilities of generated tokens."""

import random
from typing import Any

import mlx.core as mx
import pytest

import headstart
from fixtures import builtin_model, random_model, random_prompt
from headstart.checkpoint import load_tokenizer, resolve
from headstart.engine import Engine, Event, Request
from headstart.engine.text import TextStream
from headstart.errors import RequestError
from headstart.sampling import SamplingParams, logprobs

TOKENIZER = load_tokenizer(resolve("tiny-qwen3.5"))


def answer(prompt: list[int], **params: Any) -> list[Event]:
    model = random_model("dense", vocab_size=builtin_model().vocabulary)
    return list(Engine(model, TOKENIZER).submit(Request(prompt, SamplingParams(**params))))


def joined(events: list[Event]) -> str:
    return "".join(text for event in events for text in event.texts)


def tokens(events: list[Event]) -> list[int]:
    return [token for event in events for token in event.tokens]


def test_a_stop_string_ends_the_text_wherever_it_falls() -> None:
    """Pieces of a known text, across the borders of tokens and of bursts, at several depths."""
    prompt, rng = [5, 90, 31], random.Random(0)
    whole = joined(answer(prompt, max_tokens=40, k=0))
    assert len(whole) > 40
    for _ in range(6):
        start = rng.randrange(len(whole) - 8)
        stop = whole[start : start + rng.randint(1, 7)]
        for k in (0, 3, 8):
            events = answer(prompt, max_tokens=40, k=k, stop=[stop, "never said"])
            assert joined(events) == whole[: whole.find(stop)]
            assert (events[-1].finish_reason, events[-1].stop) == ("stop", stop)
            assert stop in TOKENIZER.decode(tokens(events))  # it was said, and not shown


def test_text_is_held_back_only_while_it_may_become_a_stop_string() -> None:
    stream, pieces = TextStream(TOKENIZER, ["END OF"]), []
    for token in TOKENIZER.encode("An ENDING, an END", add_special_tokens=False):
        pieces.append(stream.add(token))
        assert not stream.stopped
        assert not "".join(pieces).endswith("END")
    assert "".join(pieces) + stream.finish() == "An ENDING, an END"


@pytest.mark.parametrize("text", ["a", " a", "  a", " ", "\n a", " 🙂", "🙂", " \n", "", "\0"])
def test_text_is_what_its_tokens_are_from_the_first_character_on(text: str) -> None:
    """mlx-lm's detokenizer takes a space off the beginning of a text. But an answer goes on from its prompt."""
    stream = TextStream(TOKENIZER, ())
    pieces = [stream.add(token) for token in TOKENIZER.encode(text, add_special_tokens=False)]
    assert "".join(pieces) + stream.finish() == text


def test_whatever_the_tokens_their_text_is_the_tokenizers() -> None:
    """Parts of characters in any order, some that never become one, and long runs of them."""
    rng = random.Random(0)
    characters = [token for c in "é日🙂\x00 " for token in TOKENIZER.encode(c, add_special_tokens=False)]
    for share in (0.0, 0.5, 0.95, 1.0):
        for _ in range(50):
            said = [
                rng.choice(characters) if rng.random() < share else rng.randrange(len(TOKENIZER))
                for _ in range(rng.randint(1, 60))
            ]
            stream = TextStream(TOKENIZER, ())
            text = "".join([stream.add(token) for token in said]) + stream.finish()
            assert text == TOKENIZER.decode(said)


def test_what_never_becomes_a_character_is_not_held_back_for_ever() -> None:
    part = TOKENIZER.encode("é", add_special_tokens=False)[0]
    stream = TextStream(TOKENIZER, ())
    assert len("".join(stream.add(part) for _ in range(1000))) > 980


def test_generate_keeps_the_space_that_an_answer_begins_with() -> None:
    model = random_model("dense", vocab_size=builtin_model().vocabulary)
    the = TOKENIZER.encode(" the", add_special_tokens=False)
    assert len(the) == 1
    for k in (0, 3):
        text = headstart.generate(model, TOKENIZER, [5, 90], max_tokens=3, k=k, logit_bias={the[0]: 100})
        assert text == " the the the"


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 3}, {"temperature": 1.0, "top_k": 5}])
def test_logprobs_are_the_targets_for_every_token(params: dict[str, Any], stock_ops: None) -> None:
    """To the last bit those of mlx-lm, which computes with stock ops."""
    model = random_model("dense")
    prompt = random_prompt(model, 9)
    ways = {"max_tokens": 12, "k": 3, "logprobs": True, "top_logprobs": 4, **params}
    events = list(Engine(model).submit(Request(prompt, SamplingParams(**ways))))
    said, told = tokens(events), [each for event in events for each in event.logprobs or []]
    assert len(said) == len(told) == 12
    logits = model.lm(mx.array([prompt + said]))[0, len(prompt) - 1 : -1].astype(mx.float32)
    expected = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    for i, (token, each) in enumerate(zip(said, told, strict=True)):
        assert each.logprob == expected[i, token].item()
        best = mx.argsort(-expected[i])[:4].tolist()
        assert each.top == [(b, expected[i, b].item()) for b in best]


def test_logprobs_come_alone_or_with_as_many_others_as_asked_and_to_those_who_asked() -> None:
    model = random_model("dense")
    engine, wanted = Engine(model), [None, 0, 2, 20]
    handles = []
    for top in wanted:
        more = {} if top is None else {"logprobs": True, "top_logprobs": top}
        handles.append(engine.submit(Request(random_prompt(model, 5), SamplingParams(max_tokens=3, **more))))
    for top, handle in zip(wanted, handles, strict=True):
        for event in handle:
            if event.tokens:
                lengths = None if event.logprobs is None else {len(each.top) for each in event.logprobs}
                assert lengths == (None if top is None else {top})


def test_stop_strings_need_a_tokenizer() -> None:
    model = random_model("dense")
    with pytest.raises(RequestError, match="stop needs text"):
        Engine(model).submit(Request([1, 2], SamplingParams(stop=["x"])))


def test_text_that_cannot_be_made_ends_its_sequence_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("dense", vocab_size=builtin_model().vocabulary)
    engine = Engine(model, TOKENIZER)
    handles = [engine.submit(Request([7, n], SamplingParams(max_tokens=6, k=2))) for n in (8, 9)]
    first, add = engine.scheduler.queue.all()[0].text, TextStream.add

    def failing(self: TextStream, token: int) -> str:
        if self is first:
            raise KeyError("no such byte")
        return add(self, token)

    monkeypatch.setattr(TextStream, "add", failing)
    bad, good = [list(handle) for handle in handles]
    assert bad[-1].finish_reason == "error"
    assert good[-1].finish_reason == "length"
    assert len(tokens(good)) == 6


def test_a_list_of_the_best_does_not_depend_on_how_long_others_lists_are() -> None:
    """Logits in bfloat16 are often equal: the lower id comes first, wherever the list is cut."""
    logits = mx.random.randint(0, 4, (3, 2, 200), key=mx.random.key(7)).astype(mx.bfloat16)
    said = mx.zeros((3, 2), mx.int32)
    whole = logprobs(logits, said, 200).top_ids
    for count in (1, 5, 10, 20, 199):
        told = logprobs(logits, said, count)
        assert mx.array_equal(told.top_ids, whole[..., :count]), count
    for row, ids in zip(logits.reshape(-1, 200).tolist(), whole.reshape(-1, 200).tolist(), strict=True):
        assert ids == sorted(range(200), key=lambda token: (-row[token], token))
