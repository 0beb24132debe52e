"""The language of a text, by `langdetect`, which has its own profiles. It is seeded, so the same text gives the same
result.
"""

from functools import cache
from typing import Any


def language_of(text: str) -> str | None:
    """`"Das ist gut so."` → `"de"`; None if the text has no usable letters."""
    from langdetect.lang_detect_exception import LangDetectException

    detector = _factory().create()
    try:
        detector.append(text)
        return str(detector.detect())
    except LangDetectException:
        return None


def is_language(text: str, code: str) -> bool:
    """Whether a text is in a language. A text without usable letters counts as right, as in the public checker. "zh"
    covers both scripts."""
    found = language_of(text)
    return found is None or code in (found, found.partition("-")[0])


def known_languages() -> frozenset[str]:
    return frozenset(code for found in _factory().langlist for code in (found, found.partition("-")[0]))


@cache
def _factory() -> Any:
    from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory

    factory = DetectorFactory()
    factory.seed = 0
    factory.load_profile(PROFILES_DIRECTORY)
    return factory
