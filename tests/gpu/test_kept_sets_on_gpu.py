"""Truncated sampling and constraints on the device: all tests of them there."""

import pytest
import torch
from test_constraints import *  # noqa: F403
from test_kept_sampling import *  # noqa: F403

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
