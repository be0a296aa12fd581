"""Responses that clients can continue, read and delete, each only with the key that made it."""

import json
import zlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

from .errors import Refusal, refuse
from .responses_items import ITEMS, FunctionCallItem, FunctionCallOutputItem
from .responses_request import ResponsesRequest

MAX_STORED_BYTES = 128 * 2**20
MAX_STORED = 4096  # responses
OVERHEAD = 1024  # bytes of memory that a response takes beside what it says
FAST = 1  # level of compression


@dataclass(frozen=True)
class StoredResponse:
    client: str
    response: bytes  # compressed JSON
    conversation: bytes  # compressed JSON of the items up to and with its output

    @classmethod
    def of(cls, body: ResponsesRequest, response: str, output: list[dict[str, Any]], client: str) -> "StoredResponse":
        """Return what is kept of a response to `body`, whose input begins with its history.

        The output is kept as it was sent: nothing that the model wrote can fail here.
        """
        conversation = [*(item.to_json() for item in body.items), *output]
        return cls(
            client,
            zlib.compress(response.encode(), FAST),
            zlib.compress(json.dumps(conversation).encode(), FAST),
        )

    @property
    def size(self) -> int:
        """Return the bytes of memory that it takes."""
        return len(self.response) + len(self.conversation) + OVERHEAD

    def json(self) -> str:
        return zlib.decompress(self.response).decode()

    def before(self, body: ResponsesRequest) -> ResponsesRequest:
        """Return a request with this conversation before its own input, read as if the client had sent it."""
        items = ITEMS.validate_python(json.loads(zlib.decompress(self.conversation)))
        calls = {item.call_id for item in items if isinstance(item, FunctionCallItem)}
        for item in body.items:
            if isinstance(item, FunctionCallItem):
                calls.add(item.call_id)
            elif isinstance(item, FunctionCallOutputItem) and item.call_id not in calls:
                refuse("input", f"there is no call {item.call_id[:100]!r} that a function_call_output could answer")
        return body.model_copy(update={"input": [*items, *body.items]})


Latest = dict[str, StoredResponse]


class ResponseStore:
    def __init__(self, max_bytes: int = MAX_STORED_BYTES, max_responses: int = MAX_STORED):
        self._max_bytes, self._max_responses = max_bytes, max_responses
        self._stored: dict[str, StoredResponse] = {}  # oldest first
        self._sizes: Counter[str] = Counter()  # by client

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def size(self) -> int:
        """Return the bytes of memory that all responses take."""
        return self._sizes.total()

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

    def previous(self, body: ResponsesRequest, client: str, latest: Latest) -> StoredResponse | None:
        """Return the response that a request continues. `latest`: by id, what else may be continued."""
        if body.previous_response_id is None:
            return None
        try:
            return latest.get(body.previous_response_id) or self.get(body.previous_response_id, client)
        except Refusal as gone:
            code, param = "previous_response_not_found", "previous_response_id"
            message = f"{param}: {gone.detail}: send the conversation as input"
            raise Refusal(400, message, param=param, code=code) from None

    def put(self, id: str, stored: StoredResponse) -> None:
        self._stored[id] = stored
        self._sizes[stored.client] += stored.size
        while self.size > self._max_bytes or len(self._stored) > self._max_responses:
            # The oldest of the client that stores most: nobody can displace the responses of others.
            largest = max(self._sizes, key=self._sizes.__getitem__)
            self._drop(next(id for id, each in self._stored.items() if each.client == largest))

    def _drop(self, id: str) -> None:
        dropped = self._stored.pop(id)
        self._sizes[dropped.client] -= dropped.size
        self._sizes += Counter()  # forgets clients that store nothing
