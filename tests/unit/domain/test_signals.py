"""Signals and latencies are those of the contract, in its order."""

from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.domain.role_signals import FrontDoor, RoleSignals
from trimtab.domain.signals import LATENCY_NUMBERS, SIGNAL_NUMBERS, Latency, Signal


def test_every_signal_and_latency_of_the_contract_has_a_member() -> None:
    assert {f"SIGNAL_{signal.name}" for signal in Signal} == set(pb.Signal.keys()) - {"SIGNAL_UNSPECIFIED"}
    assert {f"LATENCY_{latency.name}" for latency in Latency} == set(pb.Latency.keys()) - {"LATENCY_UNSPECIFIED"}


def test_columns_are_in_the_order_of_the_numbers() -> None:
    """Stored samples have one value a signal, by number from 1 without a gap."""
    assert list(SIGNAL_NUMBERS.values()) == list(range(1, len(Signal) + 1))
    assert list(LATENCY_NUMBERS.values()) == sorted(LATENCY_NUMBERS.values())


def test_views_of_decisions_have_signals_of_their_fields_names() -> None:
    names = {*RoleSignals.__dataclass_fields__, *FrontDoor.__dataclass_fields__} - {"role", "window_end_s"}
    assert names <= {*Signal, *(f"{latency}_p95_s" for latency in Latency)}
