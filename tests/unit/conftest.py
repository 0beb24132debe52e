"""Properties are tested on examples, and no example is timed: machines are busy at times."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
