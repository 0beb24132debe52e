"""Products on tiles against products in fp32, and the structs that C++ and Python share."""

import ctypes
import re

import pytest
import torch

from kitae.kernels.cpu import amx, build

needs_amx = pytest.mark.skipif(not amx.available(), reason="no AMX")


@pytest.mark.parametrize("ours", [amx.Layer, amx.Decoder])
def test_fields_of_shared_structs_have_the_order_and_kinds_of_cpp(ours: type[ctypes.Structure]) -> None:
    """All are eight bytes wide, so equal order means equal offsets."""
    body = re.search(rf"^struct {ours.__name__} {{(.*?)^}};", build.SOURCE.with_name("amx.h").read_text(), re.S | re.M)
    assert body is not None
    kinds = {"int64_t": ctypes.c_int64, "double": ctypes.c_double}
    expected = []
    for declaration in re.sub(r"//.*", "", body[1]).split(";")[:-1]:
        kind, names = re.match(r"\s*(?:const )?(\w+)([\s*].*)", declaration, re.S).groups()  # type: ignore[union-attr]
        for name in names.split(","):
            expected.append((name.strip(" *"), ctypes.c_void_p if "*" in name else kinds[kind]))
    assert [(field[0], field[1]) for field in ours._fields_] == expected
    assert [getattr(ours, name).offset for name, _ in expected] == [8 * i for i in range(len(expected))]


@needs_amx
@pytest.mark.parametrize("name", ["Layer", "Decoder"])
def test_a_struct_of_another_size_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Shorter(ctypes.Structure):
        _fields_ = getattr(amx, name)._fields_[:-1]

    library = build.cpu_library()
    assert library is not None
    amx._check_sizes(library)
    monkeypatch.setattr(amx, name, Shorter)
    with pytest.raises(AssertionError, match=r"same size in amx\.h and amx\.py, got \d+ and \d+ bytes"):
        amx._check_sizes(library)


@needs_amx
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 33, 600])
@pytest.mark.parametrize(("columns", "depth"), [(32, 32), (48, 64), (259, 96), (2080, 32)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_rounds_the_exact_product_once(rows: int, columns: int, depth: int, with_bias: bool) -> None:
    torch.manual_seed(rows)
    x, w, b = (torch.randn(*shape).bfloat16() for shape in ((rows, depth), (columns, depth), (columns,)))
    bias = b if with_bias else None
    packed = amx.Packed.room(columns, depth)
    packed.fill([w])
    expected = torch.nn.functional.linear(x.double(), w.double(), None if bias is None else bias.double())
    got = amx.linear(x, packed, bias)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), expected, rtol=2**-8, atol=1e-4)


@needs_amx
def test_a_packed_weight_knows_nothing_of_later_changes_until_it_is_filled_again() -> None:
    w = torch.randn(64, 32).bfloat16()
    x = torch.eye(32).bfloat16()
    packed = amx.Packed.room(64, 32)
    packed.fill([w])
    before = w.clone()
    w.mul_(2)
    assert torch.equal(amx.linear(x, packed), before.t())
    packed.fill([w])
    assert torch.equal(amx.linear(x, packed), w.t())


@needs_amx
def test_several_weights_take_turns_in_tiles_of_sixteen_columns() -> None:
    gate, up = torch.randn(32, 32).bfloat16(), torch.randn(32, 32).bfloat16()
    packed = amx.Packed.room(64, 32)
    packed.fill([gate, up])
    expected = torch.stack((gate.view(2, 16, 32), up.view(2, 16, 32)), 1).reshape(64, 32)
    assert torch.equal(amx.linear(torch.eye(32).bfloat16(), packed), expected.t())


@needs_amx
def test_depths_that_tiles_cannot_sum_are_refused() -> None:
    assert amx.fits(64, 96, head_dim=64)
    assert not amx.fits(64, 72, head_dim=64)
    assert not amx.fits(64, head_dim=48)
    with pytest.raises(AssertionError, match="multiple of 32, got 40"):
        amx.Packed.room(64, 40)


@needs_amx
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
