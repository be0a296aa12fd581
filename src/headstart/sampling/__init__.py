"""Sampling and speculative verification: which tokens are drawn, and which drafts are accepted."""

from ..sampling_params import GrammarSpec, SamplingOptions, SamplingParams
from .accept import AcceptResult
from .controls import Controls, SequenceParams, controls
from .distribution import Logprobs, logprobs
from .grammar import GrammarMasks, Matcher, compile_grammar, find_grammar, token_bytes
from .verify import BatchContext, Proposal, accept_window, draw_window, propose, propose_certain

__all__ = [
    "AcceptResult", "BatchContext", "Controls", "GrammarMasks", "GrammarSpec", "Logprobs", "Matcher", "Proposal",
    "SamplingOptions", "SamplingParams", "SequenceParams", "accept_window", "compile_grammar", "controls",
    "draw_window", "find_grammar", "logprobs", "propose", "propose_certain", "token_bytes",
]  # fmt: skip
