"""Grammars that a client made up to end or block the server."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from attacks import CHAT, GRAMMARS, TEXT, Case, chain, lark, rules, shaped, wide
from hostile import Target

ACCEPTED = [  # as deep as is allowed: compiled, and followed in the engine's thread
    Case("references", CHAT, shaped(chain(300)), 200, None),
    Case("bare references", CHAT, shaped(chain(900, bare=True)), 200, None),
    Case("references within a Lark grammar", TEXT, lark(f"start: %json {json.dumps(chain(2_500))}"), 200, None),
    Case("rules", TEXT, lark(rules(4_000)), 200, None),
]


@pytest.mark.parametrize("case", GRAMMARS, ids=lambda case: case.name)
def test_it_is_refused_while_others_are_served(attacked: Target, case: Case) -> None:
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(attacked.check, case)
        attacked.assert_serving()
        refused.result()


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case.name)
def test_the_deepest_that_is_allowed_works(attacked: Target, case: Case) -> None:
    with attacked.http() as http:
        response = case.send(http)
    assert response.status_code == case.status, response.text[:500]
    attacked.assert_serving()


@pytest.mark.slow
def test_many_at_a_time_keep_nobody_waiting(attacked: Target) -> None:
    hard = [Case("hard", CHAT, shaped(wide(4_000 + i)), 400, "invalid_value") for i in range(3)]
    with ThreadPoolExecutor(len(hard)) as pool, attacked.http(timeout=600) as http:
        pending = [pool.submit(case.send, http) for case in hard]
        for _ in range(3):
            attacked.assert_serving()
        assert not all(each.done() for each in pending), "they were over before the small ones"
        # A fast machine compiles them in time, a slow one does not, or one fails while it is followed.
        assert {each.result().status_code for each in pending} <= {200, 400, 408, 500}
    attacked.assert_serving()
