"""Limits that every layer shares. This module imports nothing, so that an integer costs nothing."""

MAX_K = 15  # most drafts per step, from any source
MAX_HEAD_K = 8  # most drafts per step of a model's own head
DEFAULT_K = 2  # drafts per step where no model card says otherwise
MAX_IMAGE_PIXELS = 1280 * 1024  # that a model is shown of an image, by default: 1,280 tokens of Qwen3.5
