"""What a run trains on, in a few letters: to tell whether it still is what the run began with."""

import hashlib
from collections.abc import Iterable


def fingerprint(records: Iterable[object]) -> str:
    """Of what they say, in their order; two records that print the same are the same."""
    digest = hashlib.blake2b(digest_size=16)
    for record in records:
        digest.update(repr(record).encode())
    return digest.hexdigest()
