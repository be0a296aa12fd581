"""What a request may ask of the next token, and how drafts are judged by it."""

from .accept import Verdict
from .controls import Asked, Controls, controls
from .judge import Proposal, Scene, judge, propose
from .logprobs import Logprobs, logprobs
from .params import MAX_K, SamplingParams

__all__ = [
    "MAX_K", "Asked", "Controls", "Logprobs", "Proposal", "SamplingParams", "Scene", "Verdict",
    "controls", "judge", "logprobs", "propose",
]  # fmt: skip
