"""What a request may ask of the next token, and how drafts are judged by it."""

from .accept import AcceptResult
from .controls import Controls, SequenceParams, controls
from .grammar import GrammarMasks, GrammarSpec, Matcher, compile_grammar, find_grammar, spell
from .logprobs import Logprobs, logprobs
from .params import SamplingOptions, SamplingParams
from .verify import BatchContext, Proposal, accept_window, propose

__all__ = [
    "AcceptResult",
    "BatchContext",
    "Controls",
    "GrammarMasks",
    "GrammarSpec",
    "Logprobs",
    "Matcher",
    "Proposal",
    "SamplingOptions",
    "SamplingParams",
    "SequenceParams",
    "accept_window",
    "compile_grammar",
    "controls",
    "find_grammar",
    "logprobs",
    "propose",
    "spell",
]  # fmt: skip
