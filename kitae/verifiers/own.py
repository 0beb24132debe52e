"""A score function in a file of the user's own, as a verifier.

It is apart from the registry so that a worker which runs one need not import every built-in check, which takes most of
its start.
"""

from kitae.errors import VerifierError
from kitae.plugins import load_function
from kitae.verifiers.base import Verifier


def own(name: str) -> Verifier:
    """The verifier `path/to/file.py:function`. The file is executed: call this where it may do so."""
    score = load_function(name, "verifier", ("response", "reference", "context"), VerifierError)
    return Verifier(name, score, on_timeout="error", repeatable=getattr(score, "repeatable", False))
