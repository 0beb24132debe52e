"""Gradients of weights on tiles against products in double."""

import pytest
import torch

from kitae.kernels.cpu import amx

pytestmark = pytest.mark.skipif(not amx.available(), reason="no AMX")


@pytest.mark.parametrize("rows", [1, 31, 70, 1100])
@pytest.mark.parametrize(("height", "depth"), [(16, 32), (48, 96), (2064, 32), (32, 1184)])
def test_the_gradient_of_a_weight_is_added_in_fp32(rows: int, height: int, depth: int) -> None:
    torch.manual_seed(rows)
    wide, x = torch.randn(rows, height + 8).bfloat16(), torch.randn(rows, depth).bfloat16()
    dy = wide[:, 3 : 3 + height]  # rows with a stride
    before = torch.randn(height, depth)
    total = before.clone()
    amx.add_outer(total, dy, x)
    expected = before.double() + dy.double().t() @ x.double()
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-4)
