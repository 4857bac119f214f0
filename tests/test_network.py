"""Minimum cuts: against all cuts of small networks; and that of several as cheap the one next to the sink is found."""

from __future__ import annotations

import itertools

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ttmdsl.network import NEVER, Network

PLACES = [Network.SOURCE, *range(5), Network.SINK]
WAYS = st.lists(st.tuples(st.sampled_from(PLACES[:-1]), st.sampled_from(PLACES[1:]), st.integers(0, 6)), max_size=14)


def cost(ways: dict[tuple[object, object], int], near: set[object]) -> int:
    return sum(most for (a, b), most in ways.items() if a not in near and b in near)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn=WAYS)
def test_no_other_cut_costs_less_or_lies_nearer_to_the_sink(drawn: list[tuple[object, object, int]]) -> None:
    ways = {(a, b): most for a, b, most in drawn if a != b}
    network = Network()
    for (a, b), most in ways.items():
        network.join(a, b, most)
    near = network.cut()
    sides = [{Network.SINK, *some} for n in range(6) for some in itertools.combinations(PLACES[1:-1], n)]
    least = min(cost(ways, side) for side in sides)
    assert Network.SOURCE not in near
    assert cost(ways, near) == least
    assert all(near <= side for side in sides if cost(ways, side) == least)


def test_a_way_that_no_cut_goes_through() -> None:
    network = Network()
    network.join(Network.SOURCE, "a", 3)
    network.join("a", "b")
    network.join("b", Network.SINK, 4)
    assert network.cut() == {"a", "b", Network.SINK}
    assert NEVER > 1 << 50
