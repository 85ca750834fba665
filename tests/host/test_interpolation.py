"""Do the weights of interpolation give back the query, from its neighbours, and only inside of the measured points?"""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qla_jit.interpolation import delaunay_weights

COORDINATE = st.one_of(st.integers(0, 15), st.floats(0, 15))


@st.composite
def points_and_a_query_inside(draw):
    dims = draw(st.integers(1, 3))
    points = draw(st.lists(st.tuples(*[COORDINATE] * dims), min_size=1, max_size=20, unique=True))
    if dims > 1 and draw(st.booleans()):
        points = [(x,) * dims for x, *_ in points]                       # on a line, as single sequences are
    shares = draw(st.lists(st.floats(0.01, 1), min_size=len(points), max_size=len(points)))
    query = [sum(share * point[axis] for share, point in zip(shares, points, strict=True)) / sum(shares) for axis in range(dims)]
    return points, query


@given(points_and_a_query_inside())
def test_a_query_inside_is_the_weighted_mean_of_few_points(case):
    points, query = case
    weights = delaunay_weights(points, query, tolerance=1e-3)
    assert weights is not None
    assert len(weights) <= len(query) + 1
    assert min(weights.values()) > 0
    assert sum(weights.values()) == pytest.approx(1)
    mean = [sum(weight * points[number][axis] for number, weight in weights.items()) for axis in range(len(query))]
    assert mean == pytest.approx(query, abs=2e-3)


@pytest.mark.parametrize(
    ("query", "weights"),
    [((1.25,), {1: 0.75, 2: 0.25}), ((2.0,), {2: 1.0}), ((0.0,), {0: 1.0}), ((4.0,), {2: 0.5, 3: 0.5})],
    ids=str,
)
def test_on_a_line_the_two_neighbours_count(query, weights):
    assert delaunay_weights([(0,), (1,), (2,), (6,)], query, tolerance=0) == pytest.approx(weights)


def test_in_a_plane_far_points_do_not_count():
    far = [(-100, -100), (100, -100), (0, 150)]
    near = [(0, 0), (1, 0), (0, 1)]
    assert set(delaunay_weights(far + near, (0.25, 0.25), tolerance=0)) == {3, 4, 5}


@pytest.mark.parametrize(
    ("query", "distance"),
    [((2, 2), 0), ((2.05, 2), 0.05), ((2.15, 2), 0.15), ((2, 1.7), 0.3), ((4.2, 4.1), 0.3), ((9, 9), 10)],
    ids=str,
)
def test_outside_by_more_than_the_tolerance_there_are_no_weights(query, distance):
    assert (delaunay_weights([(0, 0), (4, 4)], query, tolerance=0.1) is None) == (distance > 0.1)


def test_a_query_just_outside_gets_the_weights_of_the_edge():
    assert delaunay_weights([(0, 0), (4, 4)], (4.05, 4.05), tolerance=0.2) == {1: 1.0}


def test_a_single_point_answers_for_itself_alone():
    assert delaunay_weights([(3, 3, 0)], (3, 3, 0), tolerance=0) == {0: 1.0}
    assert delaunay_weights([(3, 3, 0)], (3, 3, math.log2(3)), tolerance=0.1) is None
