"""Where Kitae keeps what it makes once for a machine."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where converted models and built kernels are kept: `$KITAE_CACHE`, else `~/.cache/kitae`."""
    return Path(os.environ.get("KITAE_CACHE") or Path.home() / ".cache" / "kitae")
