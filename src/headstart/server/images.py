"""Images in requests: what the content parts of every API say of them, and how they become pixels.

They are decoded in worker processes, which can be killed: a file may be made to take all memory or time there is.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel

from ..images import ImageRules
from ..models import Model
from .errors import Refusal, refuse
from .image_urls import fetch_image
from .prepare import Preparation
from .workers import WorkerDied

MAX_IMAGES = 64  # in a request
MAX_HEAD = 1024  # characters of a data URL before its data
LOW_DETAIL = 512 * 512  # pixels
DECODE_SECONDS = 5.0  # of CPU time for one image
UNSUPPORTED = "image input is not supported by this model"


class EncodedImage(NamedTuple):
    """An image as a client sends it: the base64 of a file, or the address of one."""

    data: str  # in which the base64 begins at `start`
    media_type: str | None
    low: bool = False  # fewer pixels will do
    remote: bool = False  # `data` is a URL
    start: int = 0


class ImagePart(BaseModel):
    """A content part with an image, of any API."""

    @abstractmethod
    def encoded(self) -> EncodedImage:
        """Return the image, or raise ValueError with what is wrong."""


def parse_image_url(url: str, *, low: bool = False) -> EncodedImage:
    """Return the image in a URL `data:image/…;base64,…`, or at another one."""
    start, comma, _ = url[:MAX_HEAD].partition(",")
    scheme, _, head = start.partition(":")
    if scheme.lower() != "data":
        return EncodedImage(url, None, low, remote=True)
    media_type, *parameters = head.split(";")
    if not comma or "base64" not in [each.strip().lower() for each in parameters]:
        raise ValueError("is not a data URL of base64: send data:image/png;base64,…")
    return EncodedImage(url, media_type.strip().lower(), low, start=len(start) + 1)


def take_images(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[ImagePart]]:
    """Return messages as templates take them, and the images whose places they mark."""
    images: list[ImagePart] = []
    taken: list[Mapping[str, Any]] = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            images += [part for part in content if isinstance(part, ImagePart)]
            content = [{"type": "image"} if isinstance(part, ImagePart) else part for part in content]
        taken.append({**message, "content": content})
    return taken, images


def count_characters(message: Mapping[str, Any]) -> int:
    content = message["content"]
    return len(content) if isinstance(content, str) else sum(len(part.get("text", "")) for part in content)


def template_content(content: str | Sequence[Any]) -> str | list[Any]:
    """Return the content of a message: its texts, joined, or with images a list of texts and images."""
    if isinstance(content, str):
        return content
    if not any(isinstance(part, ImagePart) for part in content):
        return "".join(getattr(part, "text", "") for part in content)
    texts = [{"type": "text", "text": getattr(part, "text", "")} for part in content]
    return [part if isinstance(part, ImagePart) else text for part, text in zip(content, texts, strict=True)]


def path_of(part: object, body: Any, path: str = "") -> str | None:
    """Return where in a body a part is, such as `messages[0].content[1]`."""
    if body is part:
        return path
    inner: list[tuple[str, Any]] = []
    if isinstance(body, BaseModel):
        inner = [(f"{path}.{name}".removeprefix("."), getattr(body, name)) for name in type(body).model_fields]
    elif isinstance(body, list):
        inner = [(f"{path}[{i}]", each) for i, each in enumerate(body)]
    return next((found for name, value in inner if (found := path_of(part, value, name)) is not None), None)


def check_images_allowed(parts: Sequence[ImagePart], model: Model, body: Any) -> None:
    """Refuse images if the model sees none, or not so many."""
    if parts and model.tower is None:
        refuse(path_of(parts[0], body) or "messages", f"{UNSUPPORTED}: {model.tower_unavailable}", "unsupported")
    if len(parts) > MAX_IMAGES:
        where = path_of(parts[MAX_IMAGES], body) or "messages"
        refuse(where, f"one of {len(parts)} images; at most {MAX_IMAGES} in a request: leave out the oldest")


async def read_images(
    parts: Sequence[ImagePart], rules: ImageRules, body: Any, work: Preparation
) -> list[np.ndarray]:
    """Return the pixels [H, W, 3] of images, decoded and resized, or refuse the part that is at fault."""
    found = []
    for part in parts:
        try:
            found.append(await _decode(part.encoded(), rules, work))
        except ValueError as problem:
            where = await work.run(path_of, part, body) or "messages"
            raise Refusal(400, f"{where}: the image {problem}", param=where, code="invalid_value") from problem
    return found


async def _decode(image: EncodedImage, rules: ImageRules, work: Preparation) -> np.ndarray:
    if image.remote:
        if not work.preparer.limits.image_urls:
            raise ValueError("is not a data URL, and this server fetches no others: send data:image/png;base64,…")
        data, declared = await fetch_image(image.data)
    else:
        data, declared = await work.run(lambda: image.data[image.start :].encode()), image.media_type
    if image.low:
        rules = replace(rules, max_pixels=min(rules.max_pixels, LOW_DETAIL))
    message = {
        "base64": not image.remote, "declared": declared, "rules": rules.message(), "seconds": DECODE_SECONDS
    }  # fmt: skip
    try:
        async with work.preparer.workers.worker(work.client) as worker:
            answer, pixels = await worker.call(message, data)
    except TimeoutError:
        raise ValueError(f"could not be decoded within {DECODE_SECONDS:g} s: scale it down") from None
    except WorkerDied:
        raise ValueError("could not be decoded within the server's memory: scale it down") from None
    if "error" in answer:
        raise ValueError(answer["error"])
    return np.frombuffer(pixels, np.uint8).reshape(*answer["size"], 3)
