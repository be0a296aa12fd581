"""What a request may ask of the next token, and how drafts are judged by it."""

from .accept import Verdict
from .controls import Asked, Controls, controls
from .grammar import GrammarSpec, Guide, Matcher, compile_grammar, find_grammar, spell
from .judge import Proposal, Scene, judge, propose
from .logprobs import Logprobs, logprobs
from .params import SamplingOptions, SamplingParams

__all__ = [
    "Asked", "Controls", "GrammarSpec", "Guide", "Logprobs", "Matcher", "Proposal",
    "SamplingOptions", "SamplingParams", "Scene", "Verdict", "compile_grammar", "controls", "find_grammar",
    "judge", "logprobs", "propose", "spell",
]  # fmt: skip
