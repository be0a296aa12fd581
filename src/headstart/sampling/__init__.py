"""Sampling and speculative verification: which tokens are drawn, and which drafts are accepted."""

from ..sampling_params import GrammarSpec, SamplingOptions, SamplingParams
from .accept import AcceptResult
from .controls import Controls, SequenceParams, controls
from .distribution import Logprobs, logprobs
from .grammar import GrammarMasks, compile_grammar, find_grammar, token_bytes
from .matcher import Matcher
from .window import BatchContext, Choice, Proposal, Sampler, Verdict, allowed_drafts

__all__ = [
    "AcceptResult", "BatchContext", "Choice", "Controls", "GrammarMasks", "GrammarSpec", "Logprobs", "Matcher",
    "Proposal", "Sampler", "SamplingOptions", "SamplingParams", "SequenceParams", "Verdict", "allowed_drafts",
    "compile_grammar", "controls", "find_grammar", "logprobs", "token_bytes",
]  # fmt: skip
