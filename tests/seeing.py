"""Random pictures and small models that see, for tests."""

import io
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from kitae.data.pictures import as_data, image_part
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.models.policy import Policy
from kitae.models.tiny_seeing import make_seeing
from kitae.types import Message


def picture(seed: int, height: int = 40, width: int = 50) -> Any:
    """Of large random squares, so that small towers see more than noise."""
    squares = np.random.RandomState(seed).randint(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(squares).resize((width, height), Image.Resampling.NEAREST)


def source(seed: int, height: int = 40, width: int = 50) -> str:
    buffer = io.BytesIO()
    picture(seed, height, width).save(buffer, format="PNG")
    return as_data(buffer.getvalue())


def asked(text: str, *sources: str, role: str = "user") -> Message:
    """A message that shows pictures before its text."""
    return Message(role, parts=(*map(image_part, sources), {"type": "text", "text": text}))


@cache
def folder_of(family: str, root: Path) -> Path:
    return make_seeing(root / family, family)


def load(folder: Path, **settings: Any) -> Policy:
    return load_policy(ModelConfig(path=str(folder), dtype="float32", device="cpu", **settings))
