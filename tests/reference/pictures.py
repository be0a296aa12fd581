"""Pictures, and conversations about them, for `make_vision.py` and the tests that compare with what it records."""

import numpy as np

IMAGE, START, END = 8192, 8193, 8194  # tokens of the models that `tests/vision_models.py` writes

# By name: the sizes (width, height) of pictures, and a prompt in which -1 stands for the next of them.
CASES: dict[str, tuple[list[tuple[int, int]], list[int]]] = {
    "one": ([(30, 21)], [5, 17, 130, -1, 44, 201, 9]),
    "several": ([(16, 16), (90, 40), (25, 120)], [5, -1, 77, -1, 250, 3, 88, 120, 61, -1, 7, 19]),
    "in the middle": ([(64, 48), (400, 11)], [*range(100, 140), -1, *range(200, 260), -1, *range(40, 70)]),
}
TOWER_CASES: dict[str, tuple[list[tuple[int, int]], list[int]]] = {  # for `make_towers.py`
    "one": ([(30, 21)], [5, 17, 130, -1, 44, 201, 9]),
    "two": ([(90, 40), (25, 120)], [5, *range(100, 130), -1, 77, -1, 250, 3, 88, 120, 61]),
}
MODES = ("RGB", "RGBA", "LA", "L", "P", "CMYK", "1")  # of Pillow, in which one picture is read


def picture(width: int, height: int, seed: int = 0) -> np.ndarray:
    """Return [height, width, 3]: smooth colours with a little noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / (3 + c) + seed) + np.cos(y / (2 + c) - seed) for c in range(3)]
    noisy = 127 + 50 * np.stack(waves, axis=-1) + rng.integers(-12, 13, (height, width, 3))
    return np.clip(np.rint(noisy), 0, 255).astype(np.uint8)


def prompt_of(case: str, counts: list[int]) -> list[int]:
    """Return a prompt whose pictures take so many tokens each."""
    tokens, left = [], iter(counts)
    for token in CASES[case][1]:
        tokens += [START, *[IMAGE] * next(left), END] if token < 0 else [token]
    return tokens
