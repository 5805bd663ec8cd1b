"""The comparisons can fail, and say where."""

import pytest
import torch

from plait.testing.compare import assert_bitwise, assert_close_to_fp64


def test_bitwise_names_the_first_difference():
    expected = torch.zeros(3, 4)
    actual = expected.clone()
    assert_bitwise(actual, expected)
    actual[1, 2] = -0.0
    actual[2, 0] = 5.0
    with pytest.raises(AssertionError, match=r"in 2 of 12 elements, first at \[1, 2\]: -0.0"):
        assert_bitwise(actual, expected)
    with pytest.raises(AssertionError, match=r"torch.float32 \[3, 4\], expected .*\[4, 3\]"):
        assert_bitwise(actual, expected.t())
    nan = torch.full((2,), float("nan"), dtype=torch.bfloat16)
    assert_bitwise(nan, nan.clone())


def test_twice_the_plain_error_passes_and_more_fails():
    exact = torch.full((8,), 1.0, dtype=torch.float64)
    plain = torch.full((8,), 1.0 + 1e-3)
    assert_close_to_fp64(torch.full((8,), 1.0 - 1.9e-3), exact, plain)
    with pytest.raises(AssertionError, match=r"result: largest error 3.0.*first at \[0\]"):
        assert_close_to_fp64(torch.full((8,), 1.0 - 3e-3), exact, plain)


def test_one_rounding_is_allowed_where_plain_is_exact():
    exact = torch.full((4,), 1.0, dtype=torch.float64)
    plain = torch.ones(4, dtype=torch.bfloat16)
    assert_close_to_fp64(torch.full((4,), 1.0 - 2**-8, dtype=torch.bfloat16), exact, plain)
    with pytest.raises(AssertionError, match="largest error"):
        assert_close_to_fp64(torch.full((4,), 1.0 + 2**-7, dtype=torch.bfloat16), exact, plain)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_must_not_be(bad):
    exact, plain = torch.ones(2, 2, dtype=torch.float64), torch.ones(2, 2)
    actual = plain.clone()
    actual[1, 0] = bad
    with pytest.raises(AssertionError, match=r"first at \[1, 0\]"):
        assert_close_to_fp64(actual, exact, plain)
    exact[1, 0] = plain[1, 0] = bad
    assert_close_to_fp64(actual, exact, plain)
    with pytest.raises(AssertionError, match=r"first at \[1, 0\]"):
        assert_close_to_fp64(torch.ones(2, 2), exact, plain)


def test_form_and_yardstick_are_checked():
    plain = torch.ones(2)
    with pytest.raises(AssertionError, match=r"not torch\.float64"):
        assert_close_to_fp64(plain, plain, plain)
    with pytest.raises(AssertionError, match="float16"):
        assert_close_to_fp64(plain.half(), plain.double(), plain)
    with pytest.raises(AssertionError, match="shape"):
        assert_close_to_fp64(plain, torch.ones(3, dtype=torch.float64), plain)
    assert_close_to_fp64(torch.empty(0, 3), torch.empty(0, 3).double(), torch.empty(0, 3))
