"""Responses that clients can continue, read and delete, each only with the key that made it."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from .errors import Refusal
from .response import encode_json
from .responses_items import ITEMS, Item
from .responses_request import ResponsesRequest

MAX_STORED_BYTES = 128 * 2**20
MAX_STORED = 4096  # responses


@dataclass(frozen=True)
class StoredResponse:
    client: str
    json: str
    conversation: list[Item]  # up to and with its output
    size: int  # bytes; what it shares with others counts in each of them


class ResponseStore:
    def __init__(self, max_bytes: int = MAX_STORED_BYTES, max_responses: int = MAX_STORED):
        self._max_bytes, self._max_responses = max_bytes, max_responses
        self._stored: dict[str, StoredResponse] = {}  # oldest first
        self._sizes: Counter[str] = Counter()  # by client

    def __len__(self) -> int:
        return len(self._stored)

    def get(self, id: str, client: str) -> StoredResponse:
        """Return a response of the same client. Another client's is not found, so that ids cannot be probed."""
        found = self._stored.get(id)
        if found is None or found.client != client:
            message = f"no response {id[:100]!r} is stored: it may have been dropped"
            raise Refusal(404, message, param="id", code="not_found")
        return found

    def delete(self, id: str, client: str) -> None:
        self.get(id, client)
        self._drop(id)

    def with_history(self, body: ResponsesRequest, client: str) -> ResponsesRequest:
        """Return a request with the conversation that it continues before its own input."""
        if body.previous_response_id is None:
            return body
        try:
            before = self.get(body.previous_response_id, client).conversation
        except Refusal as gone:
            code, param = "previous_response_not_found", "previous_response_id"
            message = f"{param}: {gone.detail}: send the conversation as input"
            raise Refusal(400, message, param=param, code=code) from None
        return body.model_copy(update={"input": [*before, *body.items]})

    def put(self, body: ResponsesRequest, response: dict[str, Any], client: str) -> None:
        """Keep a response to `body`, whose input begins with its history."""
        conversation = [*body.items, *ITEMS.validate_python(response["output"])]
        text = encode_json(response)
        size = len(text) + sum(len(item.model_dump_json()) for item in conversation)
        self._stored[response["id"]] = StoredResponse(client, text, conversation, size)
        self._sizes[client] += size
        while self._sizes.total() > self._max_bytes or len(self._stored) > self._max_responses:
            # The oldest of the client that stores most: nobody can displace the responses of others.
            largest = max(self._sizes, key=self._sizes.__getitem__)
            self._drop(next(id for id, each in self._stored.items() if each.client == largest))

    def _drop(self, id: str) -> None:
        dropped = self._stored.pop(id)
        self._sizes[dropped.client] -= dropped.size
        self._sizes += Counter()  # forgets clients that store nothing
