"""The reference beside an engine whose graphs are captured while it is computed."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "unit/trainer"))
from test_learner import test_the_reference_is_computed_while_the_engine_samples  # noqa: F401

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
