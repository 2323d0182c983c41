"""Fits whose factors are not negative, against numbers by hand."""

import pytest
from diptych.simulator.least_squares import fit_factors, fit_line


def test_points_on_a_line_give_the_line():
    line = fit_line([100, 1000, 4000], [0.11, 0.2, 0.5])
    assert tuple(line) == pytest.approx((0.1, 1e-4))


def test_a_falling_line_has_a_slope_of_zero_and_the_mean_as_base():
    line = fit_line([1, 2, 3], [3.0, 2.0, 1.0])
    assert tuple(line) == pytest.approx((2.0, 0.0))


def test_a_row_counts_by_its_weight():
    rows = [[1.0], [1.0]]
    assert fit_factors(rows, [1.0, 4.0]) == pytest.approx([2.5])
    assert fit_factors(rows, [1.0, 4.0], weights=[2.0, 1.0]) == pytest.approx([2.0])


def test_a_column_of_zeros_costs_nothing():
    factors = fit_factors([[1.0, 0.0, 10.0], [1.0, 0.0, 20.0]], [2.0, 3.0])
    assert factors == pytest.approx([1.0, 0.0, 0.1])


def test_columns_of_very_different_sizes_are_told_apart():
    """A step's rows stand beside the million KV tokens that they read."""
    base, row, token = 0.01, 1e-4, 1e-9
    rows = [[1.0, b, k] for b, k in ((1, 1e6), (2, 8e6), (8, 3e6), (16, 9e6), (4, 2e6))]
    values = [base + row * b + token * k for _, b, k in rows]
    assert fit_factors(rows, values) == pytest.approx([base, row, token], rel=1e-6)
