"""mlx-lm's functions with its names and responses: a program moves over by changing an import.

Arguments of mlx-lm that cannot be honoured are refused by name. Callables on logits are among them: the engine
verifies whole windows of drafts on the device, so it must know what a sampler computes.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property, partial
from operator import index
from pathlib import Path
from typing import Any, Literal, Unpack

import mlx.core as mx
from mlx_lm.sample_utils import greedy_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .checkpoint import load_model, load_tokenizer, resolve
from .engine import Engine, EngineThread, FinishReason, Handle, Origin, PromptImage, Request, Stats, insert_images
from .errors import HeadstartError, RequestError, check_text
from .images import ImageProblem, read_image
from .limits import MAX_IMAGE_PIXELS
from .models import Model
from .sampling_params import SamplingOptions, SamplingParams

Progress = Callable[[int, int], None]

# Arguments of mlx-lm that would change the output or the memory, and what to do instead.
REFUSED = {
    "logits_processors": "use SamplingParams' repetition_penalty, presence_penalty, frequency_penalty or logit_bias",
    "draft_model": "the model drafts with its own head; a block drafter is an argument of load",
    "num_draft_tokens": "use k",
    "prompt_cache": "give the whole prompt",
    "input_embeddings": "give the prompt as text or token ids",
    "max_kv_size": "the cache keeps every token; bound it with max_tokens",
    "kv_bits": "the cache is not quantised",
}
# Arguments of mlx-lm that have no effect here: the engine chooses how prompts are split into chunks.
WITHOUT_EFFECT = {"prefill_step_size", "stream", "kv_group_size", "quantized_kv_start"}
ARGUMENTS = [*SamplingOptions.__annotations__, "max_tokens", "sampler", "k", "engine", "images", "adapter"]
SAMPLER_FIELDS = {  # what make_sampler sets
    "temperature", "top_p", "min_p", "min_tokens_to_keep", "top_k", "xtc_probability", "xtc_threshold",
    "xtc_special_tokens",
}  # fmt: skip


def load(
    path: str | Path | None = None,
    *,
    mtp: bool | None = None,
    head: str | Path | None = None,
    drafter: str | Path | None = None,
    vision: bool = False,
    max_image_pixels: int = MAX_IMAGE_PIXELS,
    adapters: Mapping[str, str | Path] | None = None,
) -> tuple[Model, TokenizerWrapper]:
    """Load a model and its tokenizer.

    Args:
        path: A folder, a built-in model, a name in the Hugging Face cache or a hub id; by default the built-in model.
        mtp: Load the multi-token-prediction head; by default if there is one and HEADSTART_MTP is not 0.
        head: Another model or a drafter (`qwen3_5_mtp`) whose head is taken, named like `path`.
        drafter: A block drafter (DFlash) that was made for the model, named like `path`.
        vision: Also load the vision tower, if there is one, to answer about images.
        max_image_pixels: Larger images are scaled down to so many pixels.
        adapters: LoRA adapters by name: folders that `mlx_lm.lora` has written. Name one in `stream_generate`.
    """
    folder = resolve(path, vision=vision)
    model = load_model(
        folder,
        mtp=mtp,
        head=head,
        drafter=drafter,
        vision=vision,
        max_image_pixels=max_image_pixels,
        adapters=adapters,
    )
    return model, load_tokenizer(folder)


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


def make_sampler(
    temp: float = 0.0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    top_k: int = 0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    xtc_special_tokens: Sequence[int] | None = None,
) -> SamplingParams:
    """Return mlx-lm's sampler as sampling parameters, for `stream_generate(sampler=…)`."""
    return SamplingParams(
        temperature=temp,
        top_p=top_p or 1.0,  # mlx-lm's 0 means all tokens
        min_p=min_p,
        min_tokens_to_keep=min_tokens_to_keep,
        top_k=top_k,
        xtc_probability=xtc_probability,
        xtc_threshold=xtc_threshold,
        xtc_special_tokens=tuple(xtc_special_tokens or ()),
    )


def stream_generate(
    model: Model,
    tokenizer: TokenizerWrapper,
    prompt: str | Sequence[int] | mx.array,
    max_tokens: int = 256,
    *,
    sampler: SamplingParams | None = None,
    k: int | Literal["auto"] = "auto",
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
        prompt_progress_callback: Called with (tokens prefilled, tokens of the prompt).
        engine: Engine to share with other requests; by default a new one. To call from several threads, share an
            EngineThread.
        images: Paths, bytes of files, or Pillow's images, one for each image placeholder in the prompt. The model
            must have been loaded with `vision=True`.
        adapter: The name of one of the model's adapters.
        params: Other fields of SamplingParams, such as temperature and seed.
    """
    if not isinstance(model, Model):
        raise RequestError(f"model is a {type(model).__name__}: load it with headstart.load")
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    sampling = _sampling_params(sampler, {"max_tokens": max_tokens, "k": k, **params}, model)
    tokens, placed = _with_images(_token_ids(tokenizer, prompt), images, model)
    request = Request(tokens, sampling, keep_logits=True, images=placed, adapter=adapter)
    handle = (engine or Engine(model, tokenizer, max_sequences=1)).submit(request)
    # Errors are raised by this call and not at the first token, hence a separate generator. It is advanced into its
    # `try` here: closing a generator that has not started would not run its `finally`.
    responses = _responses(handle, prompt_progress_callback or (lambda done, total: None))
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
    responses = start(model, tokenizer, prompt, max_tokens, prompt_progress_callback=prompt_progress_callback)
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
        rate = f", {response.generation_tps:.3f} tokens-per-sec" if response.stats.rounds > 1 else ""
        print(f"Generation: {response.generation_tokens} tokens{rate}")
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
    max_tokens: int = 256,
    *,
    max_sequences: int = 16,
    k: int | Literal["auto"] = "auto",
    **params: Unpack[SamplingOptions],
) -> BatchResponse:
    """Answer several prompts in one batch.

    Args:
        max_sequences: Most prompts to decode together; the others wait.

    The other arguments are those of `stream_generate`.
    """
    sampling = _sampling_params(None, {"max_tokens": max_tokens, "k": k, **params}, model)
    engine = Engine(model, tokenizer, max_sequences=max_sequences)
    handles = [engine.submit(Request(_token_ids(tokenizer, prompt), sampling)) for prompt in prompts]
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
    return BatchResponse(texts, stats)


def _responses(handle: Handle, progress: Progress) -> Generator[GenerationResponse, None, None]:
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


def _with_images(tokens: list[int], images: Sequence[Any], model: Model) -> tuple[list[int], Sequence[PromptImage]]:
    """Return a prompt with room for its images, and where they are in it."""
    if not images:
        return tokens, ()
    if model.tower is None:
        raise RequestError(f"images cannot be seen by this model: {model.tower_unavailable}")
    pixels = []
    for n, image in enumerate(images):
        try:
            pixels.append(read_image(image, model.tower.rules))
        except ImageProblem as problem:
            raise RequestError(f"images[{n}] {problem}") from problem
    return insert_images(tokens, pixels, model.tower)


def _token_ids(tokenizer: TokenizerWrapper, prompt: str | Sequence[int] | mx.array) -> list[int]:
    if isinstance(prompt, str):
        check_text(prompt, "prompt")
        # A chat template may have put the BOS token into the text already.
        has_bos = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
        return list(tokenizer.encode(prompt, add_special_tokens=not has_bos))
    if isinstance(prompt, (bytes, bytearray, memoryview)):
        raise RequestError(f"prompt is {type(prompt).__name__}; it must be text or token ids: decode it")
    tokens: Any = prompt.tolist() if isinstance(prompt, mx.array) else prompt
    try:
        return [index(token) for token in tokens]
    except TypeError as error:
        raise RequestError("prompt must be text or one flat sequence of token ids") from error


def _sampling_params(sampler: object, arguments: dict[str, Any], model: Model) -> SamplingParams:
    """Return the sampling parameters of mlx-lm's arguments; None and [] are its "not used"."""
    for name, instead in REFUSED.items():
        value = arguments.get(name)
        if value is not None and not (isinstance(value, list) and not value):
            raise RequestError(f"{name} is not supported: {instead}")
    fields = {name: value for name, value in arguments.items() if name not in REFUSED and name not in WITHOUT_EFFECT}
    for name in fields.keys() - {*SamplingOptions.__annotations__, "max_tokens", "k"}:
        meant = "temperature" if name == "temp" else next(iter(get_close_matches(name, ARGUMENTS, n=1)), None)
        raise TypeError(f"unknown argument {name!r}" + (f": did you mean {meant!r}?" if meant else ""))
    if fields["max_tokens"] == -1:
        fields["max_tokens"] = model.context_length
    if sampler is None or sampler is greedy_sampler:
        return SamplingParams(**fields)
    if not isinstance(sampler, SamplingParams):
        raise RequestError(
            "sampler: a callable is not supported. Use headstart.make_sampler, or SamplingParams' temperature, "
            "top_p, min_p, top_k, xtc_probability and xtc_threshold"
        )
    if twice := sorted(fields.keys() & SAMPLER_FIELDS):
        raise RequestError(f"{', '.join(twice)}: also set by the sampler. Give it to make_sampler only")
    return replace(sampler, **fields)
