"""How long a client command takes to start, measured: a bench, and no matter of the unit tests."""

from bench import house


def test_the_client_starts_within_its_bar() -> None:
    measured = house.client_start_ratio(5)
    assert measured.ok, measured.details
