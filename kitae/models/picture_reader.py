"""What a model's processor makes of a picture: pixels for its vision tower, and the text that stands for it.

The processor of transformers is asked once for each picture. Its answer says which tokens mark the picture, and how
many places it takes; texts are never searched for placeholders again. Processors run on PIL and numpy. Those of
videos, which need torchvision, are left out.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kitae.data.pictures import SHELF, Shelf, mark, opened
from kitae.errors import DataError, ModelError

FAMILIES = (
    "smolvlm",
    "idefics3",
    "llava_onevision",
    "internvl",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_5",
)
"""Families that see: small models of each are compared with transformers by a test. In others (Gemma 3) places of a
picture may see each other in both directions, say, which Kitae's attention does not do."""

FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Of a model's folder, beside those of its tokenizer: an export has them too."""

_MOST_BYTES = 1 << 28  # of pixels that are kept for the tower


@dataclass(frozen=True, slots=True, eq=False)
class PictureInputs:
    """`PictureInputs({"pixel_values": …}, "<|vision_start|>…", 64)`: what the tower takes, the text that stands for the
    picture, where each run of places is a mark, and how many places there are."""

    pixels: Mapping[str, Any]
    text: str
    places: int


class PictureReader:
    """`PictureReader(processor, soft="<|image_pad|>", soft_id=151655)`.

    placeholder: what the chat template writes for a picture. soft: the token that the processor repeats for each place.
    """

    def __init__(self, processor: Any, tokenizer: Any, soft_id: int, shelf: Shelf = SHELF) -> None:
        self.processor, self.shelf = processor, shelf
        self.soft_id = soft_id
        self.soft = str(tokenizer.convert_ids_to_tokens(soft_id))
        self.placeholder = str(processor.image_token)
        self.files: Mapping[str, bytes] = {}
        self._texts: dict[int, tuple[str, int]] = {}
        self._seen: OrderedDict[int, PictureInputs] = OrderedDict()

    def __deepcopy__(self, _: Any) -> "PictureReader":
        """A copy of a tokenizer has the same reader, which any thread may use."""
        return self

    def save(self, folder: Path) -> None:
        """Write the files of the processor into the folder of an exported model."""
        for name, content in self.files.items():
            (folder / name).write_bytes(content)

    def text(self, source: str) -> str:
        """What stands for a picture in a text."""
        token = self.shelf.put(source)
        self.shelf.keep(token)
        return self._known(token)[0]

    def places(self, token: int) -> int:
        return self._known(token)[1]

    def _known(self, token: int) -> tuple[str, int]:
        if token not in self._texts:
            seen = self.see(token)
            self._texts[token] = seen.text, seen.places
        return self._texts[token]

    def see(self, token: int) -> PictureInputs:
        if (known := self._seen.get(token)) is None:
            known = self._seen[token] = self._read(token)
            size = sum(pixels.nbytes for pixels in known.pixels.values())
            while len(self._seen) * size > _MOST_BYTES and len(self._seen) > 1:  # as if all were as large
                self._seen.popitem(last=False)
        return known

    @cached_property
    def _settings(self) -> Mapping[str, Any]:
        """Of the processor, for pictures; it would put them together anew for each."""
        given = self.processor._merge_kwargs(tokenizer_init_kwargs=self.processor.tokenizer.init_kwargs)
        return {**given["images_kwargs"], "return_tensors": "pt"}

    def _read(self, token: int) -> PictureInputs:
        picture, processor = opened(self.shelf.content(token)), self.processor
        try:
            images = processor.prepare_inputs_layout(images=[picture])[0]
            found, (text,) = processor._process_images(images, **self._settings)
        except Exception as error:  # a processor is a program that came with the model
            raise DataError(
                f"the processor of the model cannot read a picture of {picture.width}×{picture.height}: {error}"
            ) from error
        pixels = {name: value for name, value in found.items() if hasattr(value, "nbytes")}
        runs = re.compile(f"(?:{re.escape(self.soft)})+")
        marked = runs.sub(lambda run: mark(token, len(run[0]) // len(self.soft)), text)
        return PictureInputs(pixels, marked, text.count(self.soft))


def read_processor(folder: Path, config: Any, tokenizer: Any) -> PictureReader | None:
    """The reader of the model in a folder; None: it has no processor of pictures, or is of a family that was not
    compared with transformers, whose pictures nobody may be shown."""
    from transformers import AutoImageProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    if config.model_type not in FAMILIES or not any((folder / name).is_file() for name in FILES[:2]):
        return None
    family = PROCESSOR_MAPPING[type(config)]
    if (soft := getattr(config, "image_token_id", None)) is None:
        raise ModelError(f"a model that sees must name the token of a picture, got {type(config).__name__} without one")
    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    rest: dict[str, Any] = {}
    if (folder / FILES[1]).is_file():
        parts = {*family.get_attributes(), "processor_class", "chat_template"}
        rest = {k: v for k, v in json.loads((folder / FILES[1]).read_text()).items() if k not in parts}
    # Processors of videos need torchvision; a class of its own takes None in their place.
    alone = type(family.__name__, (family,), {"check_argument_for_proper_class": lambda *_: None})
    others = {name: None for name in family.get_attributes() if name not in ("image_processor", "tokenizer")}
    try:
        processor = alone(image_processor=images, tokenizer=tokenizer, **others, **rest)
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        raise ModelError(f"the processor {family.__name__} must read pictures without others, got {error}") from error
    reader = PictureReader(processor, tokenizer, int(soft))
    reader.files = {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
    return reader


def reader_of(tokenizer: Any) -> PictureReader | None:
    """The reader of a model's pictures goes wherever its tokenizer goes."""
    found: PictureReader | None = getattr(tokenizer, "kitae_reader", None)
    return found
