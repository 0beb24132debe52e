"""Products of packed weights against products in double, and the structs that C++ and Python share."""

import ctypes
import re

import pytest
import torch

from kitae.kernels.cpu import compile_cpp, packed
from kitae.kernels.norms import Norm, NormRule

pytestmark = pytest.mark.skipif(not packed.available(torch.float32), reason="no C++ compiler")
DTYPES = [
    pytest.param(dtype, marks=pytest.mark.skipif(not packed.available(dtype), reason="no AMX"), id=str(dtype)[6:])
    for dtype in (torch.float32, torch.bfloat16)
]
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


@pytest.mark.parametrize("ours", [packed.ExpertMix, packed.Layer, packed.Decoder])
def test_fields_of_shared_structs_have_the_order_and_kinds_of_cpp(ours: type[ctypes.Structure]) -> None:
    """All are eight bytes wide, so equal order means equal offsets."""
    body = re.search(
        rf"^struct {ours.__name__} {{(.*?)^}};", compile_cpp.SOURCE.with_name("decoder.h").read_text(), re.S | re.M
    )
    assert body is not None
    kinds = {"int64_t": ctypes.c_int64, "double": ctypes.c_double}
    expected = []
    for declaration in re.sub(r"//.*", "", body[1]).split(";")[:-1]:
        kind, names = re.match(r"\s*(?:const )?(\w+)(?:<T>)?([\s*].*)", declaration, re.S).groups()  # type: ignore[union-attr]
        for name in names.split(","):
            expected.append((name.strip(" *"), ctypes.c_void_p if "*" in name else kinds[kind]))
    assert [(field[0], field[1]) for field in ours._fields_] == expected
    assert [getattr(ours, name).offset for name, _ in expected] == [8 * i for i in range(len(expected))]


@pytest.mark.parametrize("name", ["ExpertMix", "Layer", "Decoder"])
def test_a_struct_of_another_size_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Shorter(ctypes.Structure):
        _fields_ = getattr(packed, name)._fields_[:-1]

    library = compile_cpp.cpu_library()
    assert library is not None
    packed._check_sizes(library)
    monkeypatch.setattr(packed, name, Shorter)
    with pytest.raises(AssertionError, match=r"same size in decoder\.h and packed\.py, got \d+ and \d+ bytes"):
        packed._check_sizes(library)


def made(rows: int, columns: int, depth: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    shapes = (rows, depth), (columns, depth), (columns,)
    return tuple(torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)


def fill(*weights: torch.Tensor) -> packed.Packed:
    found = packed.Packed.room_for(torch.cat(weights).shape, weights[0].dtype)
    found.fill(weights)
    return found


@each_dtype
@pytest.mark.parametrize("rows", [1, 5, 6, 7, 13, 14, 15, 16, 17, 33, 281, 600])
@pytest.mark.parametrize(("columns", "depth"), [(32, 32), (48, 64), (259, 96), (2080, 32), (33, 4128)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_rounds_the_exact_product_once(
    rows: int, columns: int, depth: int, with_bias: bool, dtype: torch.dtype
) -> None:
    x, w, b = made(rows, columns, depth, dtype)
    bias = b if with_bias else None
    expected = torch.nn.functional.linear(x.double(), w.double(), None if bias is None else bias.double())
    got = packed.linear(x, fill(w), bias)
    assert got.dtype == dtype
    tolerance = {"rtol": 2**-8, "atol": 1e-4} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 2e-6 * depth**0.5}
    torch.testing.assert_close(got.double(), expected, **tolerance)


@each_dtype
def test_no_rows_give_none_and_rows_of_another_kind_are_refused(dtype: torch.dtype) -> None:
    weight = fill(torch.randn(48, 64).to(dtype))
    assert packed.linear(torch.empty(0, 64, dtype=dtype), weight).shape == (0, 48)
    for wrong in (torch.randn(2, 32).to(dtype), torch.randn(2, 64).double()):
        with pytest.raises(AssertionError):
            packed.linear(wrong, weight)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_in_float32_does_not_depend_on_those_around_it_nor_on_the_threads(threads: int) -> None:
    x, w, _ = made(301, 131, 2096, torch.float32)
    weight = fill(w)
    whole = packed.linear(x, weight)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for start, stop in ((0, 1), (3, 17), (100, 101), (20, 301)):
            assert torch.equal(packed.linear(x[start:stop], weight), whole[start:stop])
    finally:
        torch.set_num_threads(before)


@each_dtype
def test_a_packed_weight_knows_nothing_of_later_changes_until_it_is_filled_again(dtype: torch.dtype) -> None:
    w, x = torch.randn(64, 32).to(dtype), torch.eye(32).to(dtype)
    weight = fill(w)
    before = w.clone()
    w.mul_(2)
    assert torch.equal(packed.linear(x, weight), before.t())
    weight.fill([w])
    assert torch.equal(packed.linear(x, weight), w.t())


@each_dtype
def test_several_weights_take_turns_in_halves_of_a_panel(dtype: torch.dtype) -> None:
    gate, up = torch.randn(32, 32).to(dtype), torch.randn(32, 32).to(dtype)
    half = packed.panel_width() // 2
    expected = torch.stack((gate.view(-1, half, 32), up.view(-1, half, 32)), 1).reshape(64, 32)
    assert torch.equal(packed.linear(torch.eye(32).to(dtype), fill(gate, up)), expected.t())


@each_dtype
@pytest.mark.parametrize("rule", list(NormRule))
def test_norms_round_where_the_modules_round(rule: NormRule, dtype: torch.dtype) -> None:
    x, weight = torch.randn(96, 7).t().to(dtype), torch.randn(96).to(dtype)  # not in the order of memory
    scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    expected = {
        NormRule.EARLY: weight * scaled.to(dtype),
        NormRule.LATE: (weight * scaled).to(dtype),
        NormRule.LATE_PLUS_ONE: (scaled * (1.0 + weight.float())).to(dtype),
    }[rule]
    got = packed.norm(x, Norm(weight, 1e-5, rule))
    torch.testing.assert_close(got, expected, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


def test_depths_that_lines_cannot_hold_are_refused() -> None:
    for dtype, unit in ((torch.float32, 16), (torch.bfloat16, 32)):
        assert packed.fits(dtype, 64, 3 * unit, head_dim=64)
        assert not packed.fits(dtype, 64, 3 * unit + 8, head_dim=64)
        assert not packed.fits(dtype, 64, head_dim=48)
        with pytest.raises(AssertionError, match=f"multiple of {unit}, got 40"):
            packed.Packed.room_for((64, 40), dtype)
