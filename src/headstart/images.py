"""Read images as models take them: decoded, in RGB, and resized by the rules of a family, as transformers' image
processors do.

Imports nothing of Headstart: worker processes of the server load this file by its path, to decode what clients send.
"""

import base64
import binascii
import io
import math
import warnings
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

MAX_FILE_PIXELS = 64 * 10**6  # of a file, known before it is decoded: 256 MB in memory
MAX_ASPECT_RATIO = 200
SOFT_TOKENS = (70, 140, 280, 560, 1120)  # that Gemma 4 knows images of
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}


def decode(image: bytes, base64: bool, declared: str | None, rules: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Return the size and the pixels of a file, or what is wrong with it, as a worker process answers."""
    try:
        file = decode_base64(image.decode()) if base64 else image
        pixels = read_image(file, RULES[rules.pop("kind")](**rules), declared)
    except (ValueError, MemoryError) as error:
        return {"error": str(error) or "needs too much memory: scale it down"}, b""
    return {"size": pixels.shape[:2]}, pixels.tobytes()


class ImageProblem(ValueError):
    """Why an image cannot be used, and what to do about it."""


@dataclass(frozen=True)
class ImageRules(ABC):
    """How a model is shown images: what preprocessor_config.json says of them. The defaults are transformers'."""

    max_pixels: int = 16777216  # larger images are scaled down

    @classmethod
    @abstractmethod
    def of(cls, config: dict[str, Any], max_pixels: int) -> "ImageRules":
        """Return the rules of a preprocessor_config.json, but images of at most `max_pixels`."""

    @abstractmethod
    def show(self, image: Any) -> np.ndarray:
        """Return Pillow's image in RGB as the model is shown it: bytes [H, W, 3]."""

    def message(self) -> dict[str, Any]:
        """Return the rules as a worker process is given them."""
        return {"kind": type(self).__name__, **asdict(self)}


@dataclass(frozen=True)
class QwenRules(ImageRules):
    """Qwen2-VL's: sides that are whole tokens, near the image's own."""

    patch: int = 16
    merge: int = 2  # patches by side that become one token
    frames: int = 2  # an image is so many equal frames
    min_pixels: int = 65536
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @classmethod
    def of(cls, config: dict[str, Any], max_pixels: int) -> "QwenRules":
        size = config.get("size") or {}
        most = int(config.get("max_pixels") or size.get("longest_edge") or max_pixels)
        return cls(
            min(most, max_pixels),
            int(config.get("patch_size", cls.patch)),
            int(config.get("merge_size", cls.merge)),
            int(config.get("temporal_patch_size", cls.frames)),
            int(config.get("min_pixels") or size.get("shortest_edge") or cls.min_pixels),
            tuple(config.get("image_mean", cls.mean)),
            tuple(config.get("image_std", cls.std)),
        )

    def show(self, image: Any) -> np.ndarray:
        return resized(image, self.size(*image.size[::-1]), BICUBIC)

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size that an image is shown in: sides that are whole tokens, and pixels within the limits."""
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
        rows, columns = self.grid(pixels)
        m, p = self.merge, self.patch
        values = normalised(pixels, self.mean, self.std).reshape(rows // m, m, p, columns // m, m, p, 3)
        values = values.transpose(0, 3, 1, 4, 6, 2, 5)  # [rows, columns, merge, merge, channels, patch, patch]
        values = np.repeat(values[:, :, :, :, :, None], self.frames, axis=5)
        return values.reshape(rows * columns, -1)


@dataclass(frozen=True)
class GemmaRules(ImageRules):
    """Gemma 4's: the largest whole tokens of the image's own shape that are no more than `tokens`."""

    patch: int = 16
    pool: int = 3  # patches by side that become one token
    tokens: int = 280

    @classmethod
    def of(cls, config: dict[str, Any], max_pixels: int) -> "GemmaRules":
        return cls(
            max_pixels,
            int(config.get("patch_size", cls.patch)),
            int(config.get("pooling_kernel_size", cls.pool)),
            int(config.get("max_soft_tokens", cls.tokens)),
        )

    def show(self, image: Any) -> np.ndarray:
        return resized(image, self.size(*image.size[::-1]), BICUBIC)

    @property
    def most(self) -> int:
        """Return the most tokens of an image: where pixels limit them, a number that the model knows."""
        most = max(1, min(self.tokens, self.max_pixels // (self.patch * self.pool) ** 2))
        return most if most == self.tokens else max((each for each in SOFT_TOKENS if each <= most), default=most)

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size that an image is shown in."""
        side, most = self.patch * self.pool, self.most
        factor = math.sqrt(most * self.pool**2 * self.patch**2 / (height * width))
        rows, columns = (math.floor(factor * length / side) for length in (height, width))
        if not rows:  # a strip
            rows, columns = 1, min(width // height, most)
        elif not columns:
            rows, columns = min(height // width, most), 1
        return rows * side, columns * side

    def grid(self, pixels: np.ndarray) -> tuple[int, int]:
        """Return the rows and columns of tokens of a resized image [H, W, 3]."""
        side = self.patch * self.pool
        return pixels.shape[0] // side, pixels.shape[1] // side

    def patches(self, pixels: np.ndarray, side: int) -> np.ndarray:
        """Return the patches [N, side² · channels], from 0 to 1, of a resized image [H, W, 3] of bytes."""
        rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
        values = normalised(pixels, (0.0,) * 3, (1.0,) * 3).reshape(rows, side, columns, side, 3)
        return values.swapaxes(1, 2).reshape(rows * columns, -1)


@dataclass(frozen=True)
class StepRules(ImageRules):
    """Step-3.7's: the whole image in one square view, and the parts of a large or long one in views of their own.

    It is shown as one picture: the parts where they are in the image, and the whole one beneath.
    """

    whole: int = 728  # pixels by side
    part: int = 504
    longest: int = 3024
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD

    @classmethod
    def of(cls, config: dict[str, Any], max_pixels: int) -> "StepRules":
        whole, part = (
            int((config.get("size") or {}).get("height", cls.whole)),
            int(config.get("patch_size", cls.part)),
        )
        if not part <= whole < 2 * part:
            raise ValueError(f"views of {whole} and {part} pixels are not known")
        longest = int(config.get("max_image_size", cls.longest))
        mean, std = tuple(config.get("image_mean", cls.mean)), tuple(config.get("image_std", cls.std))
        return cls(max_pixels, whole, part, longest, mean, std)

    def show(self, image: Any) -> np.ndarray:
        width, height = image.size
        if min(width, height) < 32 and max(width, height) > 4 * min(width, height):  # a strip, at the upper left
            image = image.crop((0, 0, *[max(width, height)] * 2))
        width, height, window = self.plan(*image.size)
        small = resized(image, (height, width), BILINEAR)
        whole = resized(pillow(small), (self.whole, self.whole), BILINEAR)
        if not window:
            return whole
        across, down = (self.snap(length, window) for length in (width, height))
        cut = resized(image, (down, across), BILINEAR)
        columns, rows = max(1, across // window), max(1, down // window)
        shown = np.zeros((rows * self.part + self.whole, max(columns * self.part, self.whole), 3), np.uint8)
        for row, column in np.ndindex(rows, columns):
            part = cut[row * window : (row + 1) * window, column * window : (column + 1) * window]
            at = slice(row * self.part, (row + 1) * self.part), slice(column * self.part, (column + 1) * self.part)
            shown[at] = resized(pillow(part), (self.part, self.part), BILINEAR)
        shown[rows * self.part :, : self.whole] = whole
        return shown

    def plan(self, width: int, height: int) -> tuple[int, int, int]:
        """Return the size that an image is scaled to, and the side of its parts; 0 where it has none."""
        limit = min(self.longest / max(width, height), math.sqrt(self.max_pixels / (width * height)))
        if limit < 1:
            width, height = max(1, int(width * limit)), max(1, int(height * limit))
        short, long = sorted((width, height))
        if long <= self.whole:
            return width, height, short if long > 1.5 * short else 0
        return width, height, min(short, self.part) if long > 4 * short else self.part

    def snap(self, length: int, window: int) -> int:
        """Return the length in whole windows: one more for a rest of more than a fifth."""
        if length < window:
            return length
        return window * (length // window + (length % window > 0.2 * window))

    def parts(self, pixels: np.ndarray) -> tuple[int, int]:
        """Return the rows and columns of parts in what is shown."""
        rows = (pixels.shape[0] - self.whole) // self.part
        return rows, pixels.shape[1] // self.part if rows else 0

    def views(self, pixels: np.ndarray) -> list[np.ndarray]:
        """Return the normalised views [S, S, 3] in what is shown: the parts, and the whole image last."""
        rows, columns = self.parts(pixels)
        cut = pixels[: rows * self.part, : columns * self.part]
        tiles = (
            cut.reshape(rows, self.part, columns, self.part, 3).swapaxes(1, 2).reshape(-1, self.part, self.part, 3)
        )
        return [normalised(each, self.mean, self.std) for each in (*tiles, pixels[-self.whole :, : self.whole])]


RULES: dict[str, type[ImageRules]] = {each.__name__: each for each in (QwenRules, GemmaRules, StepRules)}
BILINEAR, BICUBIC = 2, 3  # as Pillow numbers them, which is imported when the first image comes


def pillow(pixels: np.ndarray) -> Any:
    """Return pixels as Pillow's image."""
    from PIL import Image

    return Image.fromarray(pixels)


def resized(image: Any, size: tuple[int, int], filter: int) -> np.ndarray:
    """Return Pillow's image as bytes [H, W, 3] of this height and width."""
    return np.asarray(image.resize(size[::-1], filter))


def normalised(pixels: np.ndarray, mean: tuple[float, ...], std: tuple[float, ...]) -> np.ndarray:
    """Return bytes [..., 3] as numbers from 0 to 1, less `mean` and divided by `std`."""
    about, spread = (np.array(each, np.float32) for each in (mean, std))
    levels = ((np.arange(256) * (1 / 255)).astype(np.float32)[:, None] - about) / spread  # [256, 3]
    made: np.ndarray = levels[pixels, np.arange(3)]
    return made


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
            if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
                most = f"one side may be {MAX_ASPECT_RATIO} times the other"
                raise ImageProblem(f"is {width} x {height} pixels: {most}")
            image = ImageOps.exif_transpose(image)
            if "A" in image.getbands() or image.info.get("transparency") is not None:
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, (255,) * 4), image)
            return rules.show(image.convert("RGB"))
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
