"""The model library without its progress bars and advice, and with its errors as ours."""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

from kitae.errors import KitaeError, ModelError


@contextmanager
def quiet_transformers() -> Iterator[None]:
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):  # some progress bars ignore the setting
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def reading(what: str, folder: Path) -> Iterator[None]:
    """While transformers reads a folder: quiet, and whatever it raises is a `ModelError`. What a damaged file makes it
    raise is not known beforehand: a name that torch does not have, a shape that does not fit."""
    try:
        with quiet_transformers():
            yield
    except KitaeError:
        raise
    except Exception as error:
        raise ModelError(f"cannot load {what} from {folder}: {error}") from error
