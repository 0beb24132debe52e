"""Properties are tested on examples, and no example is timed: machines are busy at times.

The examples are the same in every run, so that what passed here passes elsewhere; with `KITAE_EXAMPLES=new`, as `make
test-slow` has it, they are others.
"""

import os

from hypothesis import settings

settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("new", deadline=None)
settings.load_profile(os.environ.get("KITAE_EXAMPLES", "same"))
