"""The arguments of mlx-lm's functions, as the engine's.

Those that cannot be honoured are refused by name. Callables on logits are among them: the engine verifies whole
windows of drafts on the device, so it must know what a sampler computes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from inspect import getclosurevars, isfunction
from operator import index
from typing import Any, NoReturn

import mlx.core as mx
from mlx_lm.sample_utils import greedy_sampler
from mlx_lm.sample_utils import make_sampler as make_mlx_lm_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase

from .engine import PromptImage, insert_images
from .errors import RequestError, check_text, check_type
from .images import ImageProblem, read_image
from .models import Model
from .sampling_params import SamplingOptions, SamplingParams

# Arguments of mlx-lm that would change the output or the memory, and what to do instead.
REFUSED = {
    "logits_processors": "use SamplingParams' repetition_penalty, presence_penalty, frequency_penalty or logit_bias",
    "draft_model": "the model drafts with its own head; a block drafter is an argument of load",
    "num_draft_tokens": "use k",
    "input_embeddings": "give the prompt as text or token ids",
    "max_kv_size": "the cache keeps every token; bound it with max_tokens",
    "kv_bits": "give kv_bits=8 to load",
    "prompt_caches": "give whole prompts: the model's prefix cache finds what they share",
    "return_prompt_caches": "the model's prefix cache keeps what the prompts were computed to",
    "return_token_ids": "use stream_generate, whose responses have the token",
    "return_logprobs": "use stream_generate, whose responses have the logprobs",
    "stop_tokens": "use stop_ids, or stop for texts",
}
REFUSED_BY_LOAD = {
    "model_config": "change config.json in a copy of the folder",
    "revision": "download it with `hf download --revision`, and give the folder",
    "return_config": "config.json is in the model's folder",
}
# Arguments of mlx-lm that have no effect here: the engine chooses how prompts are split, and what is read together.
WITHOUT_EFFECT = {
    "prefill_step_size", "prefill_batch_size", "completion_batch_size", "stream", "kv_group_size",
    "quantized_kv_start",
}  # fmt: skip
ARGUMENTS = [*SamplingOptions.__annotations__, "max_tokens", "sampler", "k", "engine", "images", "adapter"]
SAMPLER_FIELDS = {  # what make_sampler sets
    "temperature", "top_p", "min_p", "min_tokens_to_keep", "top_k", "xtc_probability", "xtc_threshold",
    "xtc_special_tokens",
}  # fmt: skip


class PromptCache:
    """A conversation so far, for `stream_generate(prompt_cache=…)`: each prompt continues it, and its answer too.

    It holds the tokens. What the model has computed of them is in its prefix cache, which is bounded.
    """

    def __init__(self, model: Model):
        self.model = model
        self.tokens: list[int] = []

    def __iter__(self) -> NoReturn:
        raise RequestError(
            "a prompt cache has no layers: keep its `tokens`, which continue the conversation elsewhere"
        )


def make_prompt_cache(model: Model, max_kv_size: None = None) -> PromptCache:
    """Return an empty prompt cache for a model."""
    if max_kv_size is not None:
        raise RequestError(f"max_kv_size is not supported: {REFUSED['max_kv_size']}")
    return PromptCache(model)


def continued(prompt_cache: object, tokens: list[int], images: Sequence[Any], model: Model) -> list[int]:
    """Return a prompt after what a prompt cache holds."""
    if prompt_cache is None:
        return tokens
    check_type(prompt_cache, PromptCache, "prompt_cache", "make it with headstart.make_prompt_cache(model)")
    assert isinstance(prompt_cache, PromptCache)
    if prompt_cache.model is not model:
        raise RequestError("prompt_cache was made for another model: make one for this model")
    if images:
        raise RequestError("prompt_cache holds no images: give the whole prompt without it")
    return prompt_cache.tokens + tokens


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


def _params_of(sampler: object) -> SamplingParams:
    """Return the parameters of a sampler, also of one that mlx-lm's make_sampler has made."""
    if isinstance(sampler, SamplingParams):
        return sampler
    if sampler is greedy_sampler:
        return SamplingParams()
    if not callable(sampler):
        raise RequestError(f"sampler is a {type(sampler).__name__}: make one with headstart.make_sampler")
    if not isfunction(sampler) or sampler.__code__ not in make_mlx_lm_sampler.__code__.co_consts:
        raise RequestError(
            "sampler: a callable is not supported. Use headstart.make_sampler, or SamplingParams' temperature, "
            "top_p, min_p, top_k, xtc_probability and xtc_threshold"
        )
    held = dict(getclosurevars(sampler).nonlocals)
    for method in held.pop("sampling_methods"):
        held |= getclosurevars(method).nonlocals
    return make_sampler(**held)


def refuse_unsupported(arguments: Mapping[str, Any], refused: Mapping[str, str]) -> None:
    """Refuse arguments of mlx-lm by name; None, False and what is empty are its "not used"."""
    for name, instead in refused.items():
        value = arguments.get(name)
        if value is not None and value is not False and not (isinstance(value, (list, dict)) and not value):
            raise RequestError(f"{name} is not supported: {instead}")


def sampling_params(sampler: object, arguments: dict[str, Any], model: Model) -> SamplingParams:
    """Return the sampling parameters of mlx-lm's arguments; None and [] are its "not used"."""
    check_type(model, Model, "model", "load it with headstart.load")
    eight_bit = arguments.get("kv_bits") == 8 and model.eight_bit_kv
    refuse_unsupported({**arguments, "kv_bits": None} if eight_bit else arguments, REFUSED)
    fields = {name: value for name, value in arguments.items() if name not in REFUSED and name not in WITHOUT_EFFECT}
    for name in fields.keys() - {*SamplingOptions.__annotations__, "max_tokens", "k"}:
        meant = "temperature" if name == "temp" else next(iter(get_close_matches(name, ARGUMENTS, n=1)), None)
        raise TypeError(f"unknown argument {name!r}" + (f": did you mean {meant!r}?" if meant else ""))
    if fields["max_tokens"] == -1:
        fields["max_tokens"] = model.context_length
    if sampler is None:
        return SamplingParams(**fields)
    params = _params_of(sampler)
    if sampler is not greedy_sampler and (twice := sorted(fields.keys() & SAMPLER_FIELDS)):
        raise RequestError(f"{', '.join(twice)}: also set by the sampler. Give it to make_sampler only")
    return replace(params, **fields)


def with_images(tokens: list[int], images: Sequence[Any], model: Model) -> tuple[list[int], Sequence[PromptImage]]:
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


def wrapped(tokenizer: object) -> TokenizerWrapper:
    """Return a tokenizer as mlx-lm wraps it."""
    if isinstance(tokenizer, TokenizerWrapper):
        return tokenizer
    check_type(tokenizer, PreTrainedTokenizerBase, "tokenizer", "load it with headstart.load")
    return TokenizerWrapper(tokenizer)


def token_ids(tokenizer: TokenizerWrapper, prompt: str | Sequence[int] | mx.array) -> list[int]:
    """Return the token ids of a prompt, which may be text."""
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
        if isinstance(tokens, list) and isinstance(tokens[0], dict):
            remedy = "tokenizer.apply_chat_template(messages, add_generation_prompt=True) makes a prompt of them"
            raise RequestError(f"prompt is a list of messages: {remedy}") from error
        raise RequestError("prompt must be text or one flat sequence of token ids") from error
