"""`headstart replay`: whether a server says again what a saved response says."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import typer

from ..errors import HeadstartError
from .launch import DEFAULT_PORT, get_json, server_key

ENDPOINTS = {
    "chat.completion": "/v1/chat/completions",
    "text_completion": "/v1/completions",
    "message": "/v1/messages",
    "response": "/v1/responses",
}
SAID = ("choices", "content", "output", "stop_reason", "status")  # fields of a response that say what was generated
VOLATILE = ("id", "call_id", "signature", "encrypted_content", "logprobs", "origins", "annotations")
PARTS = ("the model's files", "the kernels, their device or settings", "the versions")  # of a fingerprint
STREAMED = ("stream", "stream_options", "return_progress", "timings_per_token", "include_origins")
Leaf = tuple[str, str]  # where in a response, and what it says there


def replay_command(
    file: Path = typer.Argument(metavar="FILE", help='JSON with the "request" and its whole "response".'),
    url: str = typer.Option(f"http://127.0.0.1:{DEFAULT_PORT}", help="The server to ask."),
) -> None:
    """Decode a saved answer again, with other drafts and in a batch, and say whether it is the same. Its request must
    have a seed or the temperature 0."""
    try:
        receipt = json.loads(file.read_text(encoding="utf-8"))
        request, response = receipt["request"], receipt["response"]
        endpoint = ENDPOINTS[response.get("object") or response["type"]]
        stats = response["generation_stats"]
        depth = stats["num_draft_tokens"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise HeadstartError(f'{file}: holds no "request" with its "response" ({error!r:.200})') from error
    check_repeatable(request)
    body = {name: value for name, value in request.items() if name not in STREAMED}
    # Three at once: each is decoded beside the others, and none as it was.
    bodies = [body | {"num_draft_tokens": k} for k in (0, "auto", "auto" if depth != 1 else 0)]
    with ThreadPoolExecutor(len(bodies)) as threads:
        answers = list(threads.map(lambda each: _ask(url, endpoint, each), bodies))
    for answer in answers:
        if problem := difference(response, answer):
            typer.echo(f"different: {problem}")
            for line in fingerprints(stats, answer["generation_stats"]):
                typer.echo(line)
            raise typer.Exit(1)
    typer.echo(f"the same {tokens(response)} tokens, {len(answers)} times")
    for line in fingerprints(stats, answers[0]["generation_stats"]):
        typer.echo(line)


def check_repeatable(request: dict[str, Any]) -> None:
    if request.get("seed") is None and request.get("temperature") != 0:
        raise HeadstartError("the request has neither a seed nor the temperature 0: its answer may change each time")
    if request.get("previous_response_id"):
        raise HeadstartError(
            "the request continues a response that the server kept: send whole conversations instead"
        )


def difference(before: Any, now: Any) -> str | None:
    """Return where two responses part."""
    for old, new in zip_longest(leaves(before), leaves(now), fillvalue=("the end", "")):
        if old == new:
            continue
        if old[0] != new[0]:
            return f"{old[0]} is in one of them, {new[0]} in the other"
        at = next((i for i, (a, b) in enumerate(zip(old[1], new[1], strict=False)) if a != b), None)
        at = min(len(old[1]), len(new[1])) if at is None else at
        return f"{old[0]} parts after {at} characters: {old[1][at : at + 40]!r} was {new[1][at : at + 40]!r} now"
    return None


def leaves(response: Any) -> Iterator[Leaf]:
    """Yield what a response says, in order, without what is new in every response."""
    for name in SAID:
        yield from _leaves(response.get(name), name)


def _leaves(value: Any, path: str) -> Iterator[Leaf]:
    if isinstance(value, dict):
        for name in sorted(value.keys() - set(VOLATILE)):
            yield from _leaves(value[name], f"{path}.{name}")
    elif isinstance(value, list):
        for i, each in enumerate(value):
            yield from _leaves(each, f"{path}[{i}]")
    elif value is not None:
        yield path, str(value)


def fingerprints(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Yield what differs in what decides the bits of an answer."""
    old, new = (str(stats.get("system_fingerprint") or "").removeprefix("b").split("-") for stats in (before, now))
    if len(old) != len(PARTS) or len(new) != len(PARTS):
        yield "a fingerprint is missing: what decides the bits cannot be compared"
        return
    for part, a, b in zip(PARTS, old, new, strict=True):
        if a != b:
            yield f"the fingerprints differ in {part} ({a}, {b})"
    if not (before.get("exact") and now.get("exact")):
        yield "the kernels are not exact there: an answer may depend on drafts and batch"


def tokens(response: dict[str, Any]) -> int:
    usage = response.get("usage") or {}
    return int(usage.get("completion_tokens") or usage.get("output_tokens") or 0)


def _ask(url: str, endpoint: str, body: dict[str, Any]) -> Any:
    try:
        return get_json(url.rstrip("/") + endpoint, server_key(), None, body)
    except HTTPError as error:
        raise HeadstartError(f"{url} refuses the request: {error.read().decode(errors='replace')[:500]}") from error
    except (OSError, ValueError) as error:
        raise HeadstartError(f"no Headstart server answers at {url} ({error})") from error
