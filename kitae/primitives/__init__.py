"""A model that is trained and sampled from step by step, by a program of one's own: see `kitae.primitives.service`."""

from kitae.primitives.datum import Datum
from kitae.primitives.service import Sampler, Trainable, Workbench, open
from kitae.primitives.trained_model import AdamParams

__all__ = ["AdamParams", "Datum", "Sampler", "Trainable", "Workbench", "open"]
