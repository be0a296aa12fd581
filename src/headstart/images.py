"""Read images as models take them: decoded, in RGB, resized to whole patches, as transformers' Pillow-based Qwen2-VL
image processor does.

Imports nothing of Headstart: worker processes of the server load this file by its path, to decode what clients send.
"""

import base64
import binascii
import io
import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_FILE_PIXELS = 64 * 10**6  # of a file, known before it is decoded: 256 MB in memory
MAX_ASPECT_RATIO = 200
FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}


def decode(image: bytes, base64: bool, declared: str | None, rules: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Return the size and the pixels of a file, or what is wrong with it, as a worker process answers."""
    try:
        file = decode_base64(image.decode()) if base64 else image
        pixels = read_image(file, ImageRules(**rules), declared)
    except (ValueError, MemoryError) as error:
        return {"error": str(error) or "needs too much memory: scale it down"}, b""
    return {"size": pixels.shape[:2]}, pixels.tobytes()


class ImageProblem(ValueError):
    """Why an image cannot be used, and what to do about it."""


@dataclass(frozen=True)
class ImageRules:
    """What preprocessor_config.json says of images. The defaults are Qwen3.5's."""

    patch: int = 16
    merge: int = 2  # patches by side that become one token
    frames: int = 2  # an image is so many equal frames
    min_pixels: int = 65536
    max_pixels: int = 16777216
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @classmethod
    def of(cls, config: dict[str, Any], max_pixels: int) -> "ImageRules":
        """Return the rules of a preprocessor_config.json, but images of at most `max_pixels`."""
        size = config.get("size") or {}
        most = int(config.get("max_pixels") or size.get("longest_edge") or max_pixels)
        return cls(
            int(config.get("patch_size", cls.patch)),
            int(config.get("merge_size", cls.merge)),
            int(config.get("temporal_patch_size", cls.frames)),
            int(config.get("min_pixels") or size.get("shortest_edge") or cls.min_pixels),
            min(most, max_pixels),
            tuple(config.get("image_mean", cls.mean)),
            tuple(config.get("image_std", cls.std)),
        )

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size that an image is shown in: sides that are whole tokens, and pixels within the limits."""
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise ImageProblem(f"is {width} x {height} pixels: one side may be {MAX_ASPECT_RATIO} times the other")
        side = self.patch * self.merge
        sizes = [round(length / side) * side for length in (height, width)]
        if math.prod(sizes) > self.max_pixels:
            ratio = math.sqrt(height * width / self.max_pixels)
            sizes = [max(side, math.floor(length / ratio / side) * side) for length in (height, width)]
        elif math.prod(sizes) < self.min_pixels:
            ratio = math.sqrt(self.min_pixels / (height * width))
            sizes = [math.ceil(length * ratio / side) * side for length in (height, width)]
        return sizes[0], sizes[1]

    def grid(self, pixels: np.ndarray) -> tuple[int, int]:
        """Return the rows and columns of patches of a resized image [H, W, 3]."""
        return pixels.shape[0] // self.patch, pixels.shape[1] // self.patch

    def patches(self, pixels: np.ndarray) -> np.ndarray:
        """Return the normalised patches [N, channels · frames · patch²] of a resized image [H, W, 3] of bytes.

        The patches of a token follow one another.
        """
        mean, std = (np.array(each, np.float32) for each in (self.mean, self.std))
        levels = ((np.arange(256) * (1 / 255)).astype(np.float32)[:, None] - mean) / std  # [256, 3]
        rows, columns = self.grid(pixels)
        m, p = self.merge, self.patch
        values = levels[pixels, np.arange(3)].reshape(rows // m, m, p, columns // m, m, p, 3)
        values = values.transpose(0, 3, 1, 4, 6, 2, 5)  # [rows, columns, merge, merge, channels, patch, patch]
        values = np.repeat(values[:, :, :, :, :, None], self.frames, axis=5)
        return values.reshape(rows * columns, -1)


def read_image(source: Any, rules: ImageRules, declared: str | None = None) -> np.ndarray:
    """Return an image as bytes [H, W, 3], resized for a model.

    Args:
        source: The bytes of a file, its path, or an image of Pillow.
        declared: The media type that a client has given it.

    Raises:
        ImageProblem: It is not an image of a known format, broken, too large, or not what was declared.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:  # pragma: no cover
        raise ImageProblem("needs Pillow to be read: install pillow") from error

    file = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow, about sizes: they are checked here
            image = source if isinstance(source, Image.Image) else Image.open(file, formats=list(FORMATS))
            kind, (width, height) = FORMATS.get(image.format or "", ""), image.size
            if declared not in (None, kind) and (declared, kind) != ("image/jpg", "image/jpeg"):
                raise ImageProblem(f"is {kind} and was sent as {str(declared)[:100]}: name its own type")
            if width * height > MAX_FILE_PIXELS:
                raise ImageProblem(f"has {width} x {height} pixels; at most {MAX_FILE_PIXELS:,}: scale it down")
            if getattr(image, "n_frames", 1) > 1:
                raise ImageProblem("is animated, and video is not supported: send a single frame")
            resized = rules.size(height, width)
            image = ImageOps.exif_transpose(image)
            if image.size != (width, height):
                resized = resized[::-1]
            if "A" in image.getbands() or image.info.get("transparency") is not None:
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, (255,) * 4), image)
            image = image.convert("RGB").resize(resized[::-1], Image.Resampling.BICUBIC)
            return np.asarray(image)
    except ImageProblem:
        raise
    except Exception as error:  # whatever Pillow raises, only the file can be its cause
        known = ", ".join(name.removeprefix("image/") for name in FORMATS.values())
        reason = str(error).replace(f" {file!r}", "")[:100]  # Pillow names the object that it reads from
        raise ImageProblem(f"cannot be read ({reason}): send a whole file, {known}") from error


def decode_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageProblem(f"is not valid base64 ({error}): encode the file's bytes") from error
