"""Imported where processes are forked: what transformers builds for the first model that it loads is there then.

Some hundred regular expressions, which take longer than a tiny model.
"""

from contextlib import suppress

with suppress(ImportError):  # of other versions
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")
