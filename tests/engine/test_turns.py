"""Prompts are cut where the model's turn begins, alike wherever they agree: an agent reads what is new."""

import random
from itertools import pairwise

import pytest

from bench.agent_turns import agent_tokenizer, replay, requests, tokens_of
from fixtures import random_model
from headstart.engine import Engine, Request
from headstart.engine.turns import MIN_TURN, TurnMarker, chunk_ends
from headstart.sampling import SamplingParams
from headstart.state import PrefixCache

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TURNS = "{% for m in messages %}<|im_start|>{{ m.content }}{% if m.role == 'user' %}<think>"
HEADER = [8186, 455]  # <|im_start|>assistant


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        pytest.param(None, TurnMarker(HEADER), id="built-in"),
        pytest.param(
            CHATML + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
            TurnMarker(HEADER),
            id="chatml",
        ),
        pytest.param(
            CHATML + "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n"
            "{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
            TurnMarker(HEADER),
            id="thinking",
        ),
        pytest.param(
            TURNS + "{% else %}<|im_end|>{% endif %}{% endfor %}", TurnMarker([8188], ends=True), id="no header"
        ),
        pytest.param("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", None, id="plain text"),
        pytest.param("{{ raise_exception('not today') }}", None, id="fails"),
        pytest.param("{{ messages | length }}", None, id="rewrites everything"),
        pytest.param("", None, id="writes nothing"),
    ],
)
def test_the_marker_of_a_turn_is_read_off_the_template(template: str | None, expected: TurnMarker | None) -> None:
    tokenizer = agent_tokenizer("built-in")
    if template is not None:
        tokenizer._tokenizer.chat_template = template
    assert TurnMarker.of(tokenizer) == expected


def test_without_a_template_or_a_tokenizer_there_is_no_marker() -> None:
    tokenizer = agent_tokenizer("built-in")
    tokenizer.has_chat_template = False
    assert TurnMarker.of(tokenizer) is TurnMarker.of(None) is None


@pytest.mark.parametrize("ends", [False, True])
def test_cuts_depend_on_what_comes_before_them(ends: bool) -> None:
    """As far as two prompts agree, and a header beyond, they are cut alike. No chunk is longer than asked for."""
    rng, marker = random.Random(1), TurnMarker([7, 8], ends=ends)
    for _ in range(100):
        tokens = [rng.choice([7, 8, 1]) if rng.random() < 0.02 else 1 for _ in range(rng.randrange(2000))]
        for _ in range(rng.randrange(6)):
            at = rng.randrange(len(tokens) + 1)
            tokens[at:at] = [7, 8]
        cuts = chunk_ends(tokens, marker, 512)
        assert all(0 < b - a <= 512 for a, b in pairwise([0, *cuts, len(tokens)])) or not tokens
        turns = [cut for cut in cuts if (tokens[cut - 2 : cut] if ends else tokens[cut : cut + 2]) == [7, 8]]
        assert set(cuts) - set(turns) <= {b for a, b in pairwise([0, *cuts]) if b - a == 512}
        assert all(b - a >= MIN_TURN or b - a == 512 or b - 512 in cuts for a, b in pairwise([0, *turns]))
        at = rng.randrange(len(tokens) + 1)
        other = chunk_ends([*tokens[:at], 9, 9, 9], marker, 512)
        assert [cut for cut in other if cut < at - 1] == [cut for cut in cuts if cut < at - 1]


@pytest.mark.parametrize("template", [pytest.param("built-in", marks=pytest.mark.slow), "dropping"])
def test_an_agent_reads_again_at_most_a_twentieth_of_what_it_could_reuse(template: str) -> None:
    tokenizer = agent_tokenizer(template)
    model = random_model("dense", vocab_size=8192, max_position_embeddings=16384)
    prompts = [tokens_of(tokenizer, messages) for messages in requests(2, scale=0.2)]
    assert any(a != b[: len(a)] for a, b in pairwise(prompts))
    engine = Engine(model, tokenizer, prefix=PrefixCache(1 << 30))
    result = replay(engine, prompts)
    assert result.reusable > 0.7 * result.total
    assert result.share >= 0.95
    for prompt in prompts[3::7]:  # and what is resumed at a turn is what one that reads all of it would answer
        params = SamplingParams(max_tokens=4, k=2)
        again, plain = (list(each.submit(Request(prompt, params))) for each in (engine, Engine(model, tokenizer)))
        assert again[-1].stats is not None
        assert again[-1].stats.prefix_cache_hit > 0
        assert [event.tokens for event in again if event.tokens] == [event.tokens for event in plain if event.tokens]
