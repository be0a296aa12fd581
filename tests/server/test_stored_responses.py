"""The store of responses: its bounds, and what of a conversation is kept."""

import random
import tracemalloc
from typing import Any

from headstart.server.responses_items import MessageItem
from headstart.server.responses_request import ResponsesRequest
from headstart.server.responses_store import ResponseStore, StoredResponse

CALLED: Any = [
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "So."}]},
    {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "weather", "arguments": '{"city": Oslo}'},
    {"type": "function_call", "id": "fc_2", "call_id": "2", "name": "weather", "arguments": '{"city": "Ås"}'},
    {"type": "function_call_output", "call_id": "1", "output": "not JSON"},
]


def test_the_store_is_bounded_and_nobody_displaces_others() -> None:
    store = ResponseStore(max_bytes=20_000, max_responses=8)

    def put(client: str, id: str, size: int) -> None:
        body = ResponsesRequest(input=[MessageItem(role="user", content=random.randbytes(size).hex())])
        store.put(id, StoredResponse.of(body, "{}", [], client))

    put("small", "kept", 100)
    for i in range(50):
        put("large", str(i), 5000)
    assert len(store) <= 8
    assert {store.get("kept", "small").client, store.get("49", "large").client} == {"small", "large"}
    put("large", "huge", 50_000)
    assert store.get("kept", "small")
    assert len(store) == 1, "what does not fit is not kept"
    for i in range(20):
        put("small", f"s{i}", 10)
    assert len(store) == 8


def test_the_store_takes_no_more_memory_than_it_counts() -> None:
    parts = [{"type": "input_text", "text": "", "annotations": [{"a": 5}]}] * 2**12
    store, count = ResponseStore(), 20
    tracemalloc.start()
    try:
        for i in range(count):
            body = ResponsesRequest.model_validate({"input": [{"role": "user", "content": parts}, CALLED[0]]})
            store.put(str(i), StoredResponse.of(body, "{}", CALLED, "client"))
        del body
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(store) == count
    assert taken < store.size + 2**15
    assert store.size < count * 2**13, "it is compressed"


def test_a_conversation_is_continued_as_it_was() -> None:
    """What clients may add to items, whatever it is, is not kept."""
    wild: Any = {"x": "\ud800", "annotations": ["\ud800"], "content": [{"type": "input_text", "text": "é", "x": []}]}
    for _ in range(300):
        wild["x"] = [wild["x"]]
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "low"}
    items = [{"role": "user", **wild}, {"role": "user", "content": [image]}, *CALLED]
    body = ResponsesRequest.model_validate({"input": items})
    stored = StoredResponse.of(body, "{}", CALLED, "client")
    again = stored.before(ResponsesRequest(input="And?"))
    assert again._messages() == ResponsesRequest.model_validate(
        {"input": [*items, *CALLED, {"role": "user", "content": "And?"}]}
    )._messages()  # fmt: skip
    assert not list(again.unknown_fields())
