"""What a request may ask of the next token, and how drafts are judged by it."""

from .accept import Verdict
from .controls import Asked, Controls, controls
from .judge import Proposal, Scene, judge, propose
from .params import MAX_K, SamplingParams

__all__ = [
    "MAX_K", "Asked", "Controls", "Proposal", "SamplingParams", "Scene", "Verdict", "controls", "judge", "propose",
]  # fmt: skip
