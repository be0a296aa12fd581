"""mlx-lm's functions with its names and responses: a program moves over by changing an import."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from types import NoneType
from typing import Any, Literal, Unpack
from weakref import WeakKeyDictionary, ref

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .arguments import (
    REFUSED_BY_LOAD,
    PromptCache,
    continued,
    make_prompt_cache,
    make_sampler,
    refuse_unsupported,
    sampling_params,
    token_ids,
    with_images,
    wrapped,
)
from .checkpoint import load_model, load_tokenizer, resolve
from .engine import Engine, EngineThread, FinishReason, Handle, Origin, Request, Stats
from .errors import HeadstartError, RequestError, check_type
from .limits import MAX_IMAGE_PIXELS
from .models import Model
from .sampling_params import SamplingOptions, SamplingParams

__all__ = [
    "BatchResponse", "GenerationResponse", "PromptCache", "batch_generate", "generate", "load", "make_prompt_cache",
    "make_sampler", "stream_generate",
]  # fmt: skip

Progress = Callable[[int, int], None]

DEFAULT_ADAPTER = "default"

_engines: WeakKeyDictionary[Model, "ref[Engine]"] = WeakKeyDictionary()
_submitting = Lock()


def load(
    path: str | Path | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    *,
    mtp: bool | None = None,
    head: str | Path | None = None,
    drafter: str | Path | None = None,
    vision: bool = False,
    max_image_pixels: int = MAX_IMAGE_PIXELS,
    adapters: Mapping[str, str | Path] | None = None,
    adapter_path: str | Path | None = None,
    kv_bits: int | None = None,
    model_config: None = None,
    return_config: Literal[False] = False,
    revision: None = None,
    lazy: bool = False,
    trust_remote_code: bool = False,
) -> tuple[Model, TokenizerWrapper]:
    """Load a model and its tokenizer.

    Args:
        path: A folder, a built-in model, a name in the Hugging Face cache or a hub id; by default the built-in model.
        tokenizer_config: Arguments for the tokenizer. Code that comes with a model is never run, whatever they say.
        mtp: Load the multi-token-prediction head; by default if there is one and HEADSTART_MTP is not 0.
        head: Another model or a drafter (`qwen3_5_mtp`) whose head is taken, named like `path`.
        drafter: A drafter that was made for the model (DFlash, a Gemma 4's assistant), named like `path`.
        vision: Also load the vision tower, if there is one, to answer about images.
        max_image_pixels: Larger images are scaled down to so many pixels.
        adapters: LoRA adapters by name: folders that `mlx_lm.lora` has written. Name one in `stream_generate`.
        adapter_path: An adapter that every request uses which names no other.
        kv_bits: 8 keeps KV caches in 8 bits: about half the memory, faster with long contexts, and not exact.
        model_config, return_config, revision: mlx-lm's; refused by name.
        lazy, trust_remote_code: mlx-lm's; no effect.
    """
    given = {"model_config": model_config, "return_config": return_config, "revision": revision}
    refuse_unsupported(given, REFUSED_BY_LOAD)
    check_type(tokenizer_config, (Mapping, NoneType), "tokenizer_config", "give a dict of arguments")
    check_type(adapters, (Mapping, NoneType), "adapters", "give a dict of names and folders")
    for name, of in {"path": path, "head": head, "drafter": drafter, "adapter_path": adapter_path}.items():
        check_type(of, (str, Path, NoneType), name, "give a folder or a name")
    if adapter_path is not None:
        adapters = {DEFAULT_ADAPTER: adapter_path, **(adapters or {})}
    folder = resolve(path, vision=vision)
    model = load_model(
        folder,
        mtp=mtp,
        head=head,
        drafter=drafter,
        vision=vision,
        max_image_pixels=max_image_pixels,
        adapters=adapters,
        kv_bits=kv_bits,
    )
    if adapter_path is not None:
        model = replace(model, default_adapter=DEFAULT_ADAPTER)
    return model, load_tokenizer(folder, tokenizer_config)


@dataclass(frozen=True)
class GenerationResponse:
    """One generated token: mlx-lm's fields, then `origin` and `stats`."""

    text: str  # text that the token adds; may be empty
    token: int
    from_draft: bool
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float  # GB
    finish_reason: FinishReason | None
    origin: Origin
    stats: Stats  # of the whole answer so far
    _logits: mx.array = field(repr=False)  # [V]

    @cached_property
    def logprobs(self) -> mx.array:
        """Return the model's own log-probabilities [V], in float32, computed on first use."""
        logits = self._logits.astype(mx.float32)
        return logits - mx.logsumexp(logits)


def stream_generate(
    model: Model,
    tokenizer: TokenizerWrapper,
    prompt: str | Sequence[int] | mx.array,
    max_tokens: int = 256,
    *,
    sampler: SamplingParams | None = None,
    k: int | Literal["auto"] = "auto",
    prompt_cache: PromptCache | None = None,
    prompt_progress_callback: Progress | None = None,
    engine: Engine | EngineThread | None = None,
    images: Sequence[Any] = (),
    adapter: str | None = None,
    **params: Unpack[SamplingOptions],
) -> Generator[GenerationResponse, None, None]:
    """Yield a response per token, the last with a `finish_reason`. Closing the generator cancels the request.

    Args:
        prompt: Text, or token ids.
        max_tokens: Most tokens to generate; -1 goes on to the end of the context.
        sampler: From `make_sampler`, instead of sampling parameters.
        k: Drafts per step, or "auto": as many as pay.
        prompt_cache: From `make_prompt_cache`: the prompt continues the conversation that it holds. Without one, give
            the whole conversation: what the model has read before is found in its prefix cache all the same.
        prompt_progress_callback: Called with (tokens prefilled, tokens of the prompt).
        engine: Engine to share with other requests; by default one that calls with this model share while they run.
        images: Paths, bytes of files, or Pillow's images, one for each image placeholder in the prompt. The model
            must have been loaded with `vision=True`.
        adapter: The name of one of the model's adapters.
        params: Other fields of SamplingParams, such as temperature and seed.
    """
    sampling = sampling_params(sampler, {"max_tokens": max_tokens, "k": k, **params}, model)
    tokenizer = wrapped(tokenizer)
    check_type(engine, (Engine, EngineThread, NoneType), "engine", "make one with headstart.Engine(model, tokenizer)")
    if not callable(prompt_progress_callback or print):
        raise RequestError("prompt_progress_callback is not a function")
    conversation = continued(prompt_cache, token_ids(tokenizer, prompt), images, model)
    tokens, placed = with_images(conversation, images, model)
    request = Request(tokens, sampling, keep_logits=True, images=placed, adapter=adapter)
    handle = engine.submit(request) if engine is not None else _submit(model, tokenizer, request)
    if prompt_cache is not None:
        prompt_cache.tokens = conversation
    # Errors are raised by this call and not at the first token, hence a separate generator. It is advanced into its
    # `try` here: closing a generator that has not started would not run its `finally`.
    answer = [] if prompt_cache is None else prompt_cache.tokens
    responses = _responses(handle, answer, prompt_progress_callback or (lambda done, total: None))
    next(responses)
    return responses


def generate(
    model: Model,
    tokenizer: TokenizerWrapper,
    prompt: str | Sequence[int] | mx.array,
    verbose: bool = False,
    max_tokens: int = 256,
    *,
    sampler: SamplingParams | None = None,
    k: int | Literal["auto"] = "auto",
    prompt_cache: PromptCache | None = None,
    prompt_progress_callback: Progress | None = None,
    engine: Engine | EngineThread | None = None,
    images: Sequence[Any] = (),
    adapter: str | None = None,
    **params: Unpack[SamplingOptions],
) -> str:
    """Return the whole answer as text.

    Args:
        verbose: Print the text as it is generated, and the rates after it.

    The other arguments are those of `stream_generate`.
    """
    start = partial(stream_generate, sampler=sampler, k=k, engine=engine, images=images, adapter=adapter, **params)
    start = partial(start, prompt_cache=prompt_cache, prompt_progress_callback=prompt_progress_callback)
    responses = start(model, tokenizer, prompt, max_tokens)
    if verbose:
        print("=" * 10)
    text = ""
    with closing(responses):
        for response in responses:
            if verbose:
                print(response.text, end="", flush=True)
            text += response.text
    if verbose:
        print("\n" + "=" * 10)
        print(f"Prompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec")
        print(f"Generation: {response.generation_tokens} tokens{_rate(response.generation_tps)}")
        print(f"Speculation: {response.stats.tokens_per_round:.2f} tokens per round")
        print(f"Peak memory: {response.peak_memory:.3f} GB")
    return text


@dataclass(frozen=True)
class BatchResponse:
    """The texts of a batch of prompts and their stats, in the order of the prompts."""

    texts: list[str]
    stats: list[Stats]


def batch_generate(
    model: Model,
    tokenizer: TokenizerWrapper,
    prompts: Sequence[str | Sequence[int] | mx.array],
    max_tokens: int | Sequence[int] = 256,
    *,
    max_sequences: int = 16,
    sampler: SamplingParams | None = None,
    k: int | Literal["auto"] = "auto",
    verbose: bool = False,
    **params: Unpack[SamplingOptions],
) -> BatchResponse:
    """Answer several prompts in one batch.

    Args:
        max_tokens: Most tokens to generate, for all prompts or for each.
        max_sequences: Most prompts to decode together; the others wait.
        verbose: Print the rates at the end.

    The other arguments are those of `stream_generate`.
    """
    check_type(prompts, Iterable, "prompts", "give a list of prompts")
    prompts = prompts if isinstance(prompts, (str, bytes)) else list(prompts)
    limits = list(max_tokens) if isinstance(max_tokens, Iterable) else [max_tokens] * len(prompts)
    if len(limits) != len(prompts):
        raise RequestError(f"max_tokens has {len(limits)} numbers for {len(prompts)} prompts")
    sampling = [sampling_params(sampler, {"max_tokens": most, "k": k, **params}, model) for most in limits]
    if isinstance(prompts, (str, bytes)):
        raise RequestError("prompts is one text: give a list of prompts")
    tokenizer = wrapped(tokenizer)
    requests = [Request(token_ids(tokenizer, each), own) for each, own in zip(prompts, sampling, strict=True)]
    engine = Engine(model, tokenizer, max_sequences=max_sequences)
    handles = [engine.submit(request) for request in requests]
    texts, stats = [], []
    for handle in handles:
        text = ""
        for event in handle:
            if event.error is not None:
                raise event.error
            text += "".join(event.texts)
        assert event.stats is not None
        texts.append(text)
        stats.append(event.stats)
    if verbose and stats:
        every = Stats.of(stats)
        print(f"Generation: {every.generation_tokens} tokens{_rate(every.generation_tps)}")
        print(f"Speculation: {every.tokens_per_round:.2f} tokens per round")
    return BatchResponse(texts, stats)


def _rate(tps: float) -> str:
    """Return a rate, if there is one: answers of one round have none."""
    return f", {tps:.3f} tokens-per-sec" if tps else ""


def _submit(model: Model, tokenizer: TokenizerWrapper, request: Request) -> Handle:
    """Queue a request at the engine that calls with a model share. It ends with the last of their requests."""
    with _submitting:
        known = _engines.get(model)
        engine = known() if known is not None else None
        if engine is None or engine.broken or engine.tokenizer is not tokenizer:
            engine = Engine(model, tokenizer)
            _engines[model] = ref(engine)
        return engine.submit(request)


def _responses(handle: Handle, answer: list[int], progress: Progress) -> Generator[GenerationResponse, None, None]:
    prompt_tokens, generated = len(handle.request.prompt), 0
    try:
        yield  # type: ignore[misc]  # stream_generate advances to here
        progress(0, prompt_tokens)
        for event in handle:
            if event.error is not None:
                raise event.error
            if event.prompt_processed:
                progress(event.prompt_processed, prompt_tokens)
                continue
            assert event.stats is not None
            if event.logits is None:
                raise HeadstartError("answer cut off: all requests of this engine were cancelled")
            if not generated:
                progress(prompt_tokens, prompt_tokens)
            for i, (token, text, origin) in enumerate(zip(event.tokens, event.texts, event.origins, strict=True)):
                generated += 1
                answer.append(token)
                yield GenerationResponse(
                    text=text,
                    token=token,
                    from_draft=origin in ("draft", "copy"),
                    prompt_tokens=prompt_tokens,
                    prompt_tps=event.stats.prompt_tps,
                    generation_tokens=generated,
                    generation_tps=event.stats.generation_tps,
                    peak_memory=mx.get_peak_memory() / 1e9,
                    finish_reason=event.finish_reason if i == len(event.tokens) - 1 else None,
                    origin=origin,
                    stats=event.stats,
                    _logits=event.logits[i],
                )
    finally:
        handle.cancel()
