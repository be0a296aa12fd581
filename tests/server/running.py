"""A real server on a free port of this machine, with a tiny random model, the built-in tokenizer and real clients."""

import asyncio
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import mlx.core as mx
from fastapi import FastAPI
from mlx_lm.tokenizer_utils import TokenizerWrapper

from checkpoints import write
from fixtures import Answer, collect
from headstart.checkpoint import load_model, load_tokenizer, read_layout, resolve
from headstart.engine import Engine, EngineThread, Request
from headstart.models import Model
from headstart.sampling import SamplingParams
from headstart.server.anthropic_request import CountTokensRequest
from headstart.server.app import create_app
from headstart.server.listen import bind
from headstart.server.loaded_model import LoadedModel
from headstart.server.middleware import Keys
from headstart.server.model_pool import ModelPool
from headstart.server.pooled_model import PooledModel
from headstart.server.prompt import Prompt
from headstart.server.request_fields import GenerationRequest
from headstart.server.routes import open_app
from headstart.server.server import Server
from headstart.server.settings import Limits
from headstart.server.states import ServerState
from headstart.state import PrefixCache

if TYPE_CHECKING:  # clients are imported by the processes that use them: it takes seconds
    from anthropic import Anthropic
    from openai import AsyncOpenAI, OpenAI

HUB_ID = "someone/tiny-random"
CONTEXT = 4096
WITHOUT_MODEL = (
    "headstart_state", "headstart_engine_healthy", "headstart_engine_restarts_total", "headstart_memory_bytes",
)  # fmt: skip
HANG = 300.0  # seconds after which a test gives up, however slow the machine: the first steps compile kernels


@cache
def tokenizer() -> TokenizerWrapper:
    return load_tokenizer(resolve("tiny-qwen3.5"))


@cache
def folder(head: bool, context: int) -> Path:
    """A checkpoint where the Hugging Face cache would have it."""
    snapshots = Path(tempfile.mkdtemp()) / f"models--{HUB_ID.replace('/', '--')}" / "snapshots"
    sizes = {"vocab_size": 8192, "max_position_embeddings": context}
    return write(snapshots / "0123abc", "dense", head=head, **sizes)


@cache
def tiny(head: bool, context: int) -> Model:
    """It generates all kinds of tokens, whole characters and parts of them, and accepts some drafts."""
    return load_model(folder(head, context), dtype=mx.float32)


def pooled_model(head: bool = True, context: int = CONTEXT, **fields: Any) -> PooledModel:
    model, layout = tiny(head, context), read_layout(folder(head, context))
    return PooledModel.of_loaded(layout, model, tokenizer(), id="tiny", vision=model.tower is not None, **fields)


def loaded_model(known: PooledModel | None = None, limits: Limits | None = None) -> LoadedModel:
    """A model whose prompts can be prepared. Nothing runs."""
    known = known or pooled_model()
    engine = Engine(known.read(), known.load_tokenizer(), prefix=PrefixCache(0), max_queue=None)
    known.put(EngineThread(engine), limits or Limits())
    assert known.loaded is not None
    return known.loaded


@dataclass
class Running:
    url: str
    room: EngineThread
    known: PooledModel
    server: Server
    key: str | None = None

    @property
    def served(self) -> LoadedModel:
        assert self.known.loaded is not None
        return self.known.loaded

    @property
    def ports(self) -> set[int]:
        """Of the clients that are connected."""
        return {each.client[1] for each in set(self.server.server_state.connections) if each.client}

    def openai(self, **options: Any) -> "OpenAI":
        from openai import OpenAI

        return OpenAI(**self._client(), **options)

    def async_openai(self, **options: Any) -> "AsyncOpenAI":
        from openai import AsyncOpenAI

        return AsyncOpenAI(**self._client(), **options)

    def anthropic(self, **options: Any) -> "Anthropic":
        from anthropic import Anthropic

        known = {"base_url": self.url, "api_key": self.key or "none", "max_retries": 0, "timeout": HANG}
        return Anthropic(**known | options)

    def http(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=HANG)

    def _client(self) -> dict[str, Any]:
        return {"base_url": f"{self.url}/v1", "api_key": self.key or "none", "max_retries": 0, "timeout": HANG}

    def metric(self, name: str, **labels: str) -> float:
        """A sample of /metrics, 0 where there is none yet. The model is the first unless `labels` names another."""
        labels = labels if name in WITHOUT_MODEL else {"model": self.known.id} | labels
        wanted = name + ("{" + ",".join(f'{k}="{v}"' for k, v in sorted(labels.items())) + "}" if labels else "")
        with self.http() as client:
            lines = client.get("/metrics").text.splitlines()
        return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.rsplit(" ", 1)[0] == wanted), 0.0)


@dataclass
class Starting:
    """A server that has no model yet."""

    place: socket.socket
    app: FastAPI
    state: ServerState
    server: Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.place.getsockname()[1]}"

    def open(self, pool: ModelPool, *, ready: bool = True, **options: Any) -> None:
        self.server.call(open_app(self.app, self.state, pool, **options)).result(HANG)
        if ready:
            self.state.doing = None


@contextmanager
def starting(*, deadline: float = 5.0, drain: float = 0.0, **app: Any) -> Iterator[Starting]:
    state = ServerState(names=["tiny"])
    start = create_app(state, **app)
    server = Server(start, state, deadline=deadline, drain=drain)
    with bind("127.0.0.1", 0) as place, server.running(place):
        yield Starting(place, start, state, server)


@contextmanager
def running(
    *,
    head: bool = True,
    context: int = CONTEXT,
    key: str | None = None,
    other_keys: tuple[str, ...] = (),
    limits: Limits | None = None,
    cors_origins: tuple[str, ...] = (),
    deadline: float = 5.0,
    send_buffer: int | None = None,
    room_type: type[EngineThread] = EngineThread,
    **engine: Any,
) -> Iterator[Running]:
    known = pooled_model(head, context)
    burst = {"burst": engine.pop("burst")} if "burst" in engine else {}
    room = room_type(
        Engine(known.read(), tokenizer(), **{"max_queue": 256, "prefix": PrefixCache(0)} | engine), **burst
    )
    keys = Keys([*([key] if key else []), *other_keys])
    pool = ModelPool.of_one(room, known, limits)
    with starting(keys=keys, limits=pool.limits, cors_origins=cors_origins, deadline=deadline) as start:
        if send_buffer is not None:
            start.place.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        start.open(pool)
        yield Running(start.url, room, known, start.server, key)


@dataclass
class Address:
    """A server of several models."""

    url: str

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=HANG)


@contextmanager
def serving(pool: ModelPool, *, allow_download: bool = False) -> Iterator[Address]:
    with starting(limits=pool.limits) as start:
        start.open(pool, allow_download=allow_download)
        yield Address(start.url)


class Reader:
    """A client that waits for its answer."""

    async def receive(self) -> dict[str, str]:
        return await asyncio.get_running_loop().create_future()


def read(asked: CountTokensRequest | GenerationRequest, known: PooledModel, limits: Limits | None = None) -> Prompt:
    """Prepare a prompt as a server does."""

    async def main() -> Prompt:
        loaded = loaded_model(known, limits)
        try:
            async with loaded.preparer.preparing(Reader(), "", inf) as work:  # type: ignore[arg-type]
                return await asked.make_prompt(loaded, work)
        finally:
            await loaded.preparer.close()

    return asyncio.run(main())


def wait_until(true: Callable[[], Any], seconds: float = HANG) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.01)


def chat_tokens(*said: str) -> list[int]:
    """Users and assistants in turn, as the template has it."""
    roles = ["user", "assistant"] * len(said)
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    return list(tokenizer().apply_chat_template(messages, add_generation_prompt=True, enable_thinking=None))


@dataclass
class Alone(Answer):
    text: str = ""


_known: dict[str, Alone] = {}


def alone(prompt: list[int], **params: Any) -> Alone:
    """What a fresh engine that has nothing else to do generates: computed once, where it is always the same."""
    key = repr((prompt, params))
    if "seed" in params or not params.get("temperature"):
        return _known[key] if key in _known else _known.setdefault(key, _generated(prompt, **params))
    return _generated(prompt, **params)


def _generated(prompt: list[int], **params: Any) -> Alone:
    engine = Engine(tiny(True, CONTEXT), tokenizer(), prefix=PrefixCache(0))
    handle = engine.submit(Request(prompt, SamplingParams(**params)))
    texts: list[str] = []
    put = handle.put
    handle.put = lambda event: (texts.extend(event.texts), put(event))[1]  # type: ignore[method-assign]
    answer = collect(handle)
    return Alone(**vars(answer), text="".join(texts))
