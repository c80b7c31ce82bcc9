"""What gateways have open at each replica: who moves, who does not, and whose word counts."""

import pytest

from metrics_collector.core.role_load import ReplicaLoads, ReplicaReport


def board() -> ReplicaLoads:
    return ReplicaLoads(expiry_s=3.0)


def test_a_replica_that_nobody_named_is_not_known() -> None:
    loads = board()
    loads.report("gw", {"a": ReplicaReport(1, 0)}, at_s=100.0)

    assert loads.load("b", 100.0) is None


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        pytest.param([(100.0, 2, 0), (101.0, 2, 0), (102.0, 2, 0)], (2, 2.0), id="work that does not move ages"),
        pytest.param([(100.0, 2, 0), (101.0, 2, 3), (102.0, 2, 0)], (2, 1.0), id="an answer is a move"),
        pytest.param([(100.0, 0, 1), (101.0, 0, 0), (102.0, 2, 0)], (2, 0.0), id="idle time is nobody's fault"),
        pytest.param([(100.0, 2, 0), (101.0, None, 0), (102.0, 1, 0)], (1, 0.0), id="not named is without work"),
        pytest.param([(100.0, 2, 0), (102.0, None, 0)], (0, 2.0), id="it had work, and has none"),
    ],
)
def test_how_long_a_replica_has_not_moved(reports, expected) -> None:
    loads = board()
    for at_s, in_flight, answered in reports:
        loads.report("gw", {} if in_flight is None else {"a": ReplicaReport(in_flight, answered)}, at_s=at_s)

    assert loads.load("a", 102.0) == expected


def test_gateways_add_up_and_a_silent_one_is_left_out() -> None:
    loads = board()
    loads.report("gw-0", {"a": ReplicaReport(2, 0)}, at_s=100.0)
    loads.report("gw-1", {"a": ReplicaReport(3, 1)}, at_s=102.0)

    assert loads.load("a", 102.0) == (5, 0.0)
    assert loads.load("a", 103.5) == (3, 1.5)
    assert loads.totals(103.5).keys() == {"a"}
    assert loads.load("a", 106.0) is None


def test_another_collector_knows_what_was_told_to_this_one() -> None:
    here, there = board(), board()
    here.report("gw-0", {"a": ReplicaReport(2, 0)}, at_s=100.0)
    there.report("gw-1", {"a": ReplicaReport(1, 0)}, at_s=101.0)

    gone = there.take([here.told("c-0", 101.0)], 101.0)

    assert gone == frozenset()
    assert there.load("a", 102.0) == (3, 1.0)
    there.take([here.told("c-0", 101.0)], 105.0)
    assert there.load("a", 101.5) == (1, 0.5), "a collector that is silent says nothing any more"


def test_a_gateway_that_went_over_to_another_collector_is_counted_there_alone() -> None:
    here, there = board(), board()
    here.report("gw-0", {"a": ReplicaReport(2, 0)}, at_s=100.0)
    there.report("gw-0", {"a": ReplicaReport(2, 0)}, at_s=101.0)

    gone = here.take([there.told("c-1", 101.0)], 101.0)

    assert gone == {"gw-0"}
    assert here.load("a", 101.0) == (2, 0.0)
    assert there.take([here.told("c-0", 101.0)], 101.0) == frozenset(), "the newer word stays"
