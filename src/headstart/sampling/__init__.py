"""What a request may ask of the next token, and how drafts are judged by it."""

from .accept import Verdict, greedy
from .params import SamplingParams

__all__ = ["SamplingParams", "Verdict", "greedy"]
