"""Where the engine reduces to a queue, it waits as queueing theory says."""

import heapq

import numpy as np
import pytest

from simulator.core.event_engine import EventEngine
from simulator.core.limits import EngineLimits
from simulator.core.requests import EngineRequest
from simulator.core.timing import IterationModel

TICK_S = 1.0 / 1024
"""Every iteration takes this long, so a request of n tokens is served for n ticks."""
TICKING = IterationModel(
    host_s=TICK_S, weights_s=0.0, linear_s=0.0, token_s=0.0, seq_s=0.0, kv_token_s=0.0, attention_pair_s=0.0
)


def waits_s(arrivals_s: np.ndarray, service_ticks: np.ndarray, slots: int) -> np.ndarray:
    """Seconds from arrival to the first iteration, by order of arrival."""
    longest = int(service_ticks.max()) + 1
    limits = EngineLimits(
        max_num_batched_tokens=8192,
        max_num_seqs=slots,
        block_size=16,
        num_gpu_blocks=slots * (longest // 16 + 2),
        max_model_len=longest,
        enable_prefix_caching=False,
    )
    engine = EventEngine(limits, TICKING)
    waits = np.zeros(len(arrivals_s))
    finished = []
    for index, (at_s, ticks) in enumerate(zip(arrivals_s.tolist(), service_ticks.tolist(), strict=True)):
        while engine.next_s < at_s:
            finished += engine.fire()
        engine.submit(EngineRequest(str(index), 1, ticks), at_s)
    while engine.unfinished:
        finished += engine.fire()
    assert len(finished) == len(arrivals_s)
    for one in finished:
        assert one.scheduled_s is not None
        waits[int(one.request.request_id)] = one.scheduled_s - one.arrival_s
    return waits


def lindley_s(arrivals_s: np.ndarray, service_s: np.ndarray) -> np.ndarray:
    """Waits of one first-come-first-served server: w' = max(0, w + service − gap)."""
    waits = np.zeros(len(arrivals_s))
    for n in range(1, len(arrivals_s)):
        waits[n] = max(0.0, waits[n - 1] + service_s[n - 1] - (arrivals_s[n] - arrivals_s[n - 1]))
    return waits


def one_server_s(gaps_s: np.ndarray, service_s: np.ndarray) -> float:
    """Mean of the same, at once: the wait is how far the walk of service less gap stands above its lowest point."""
    walk = np.concatenate(([0.0], np.cumsum(service_s[:-1] - gaps_s[1:])))
    return float((walk - np.minimum.accumulate(walk)).mean())


def earliest_free_s(arrivals_s: np.ndarray, service_s: float, servers: int) -> np.ndarray:
    """Waits of c servers and one queue, each request by whoever is free first (Kiefer and Wolfowitz)."""
    free_s = [0.0] * servers
    waits = []
    for at_s in arrivals_s.tolist():
        start_s = max(at_s, heapq.heappop(free_s))
        waits.append(start_s - at_s)
        heapq.heappush(free_s, start_s + service_s)
    return np.array(waits)


def mdc_wait_s(rate_rps: float, service_s: float, servers: int) -> float:
    """Mean wait of M/D/c, exactly: who is there one service later is max(0, n − c) plus the arrivals meanwhile."""
    load = rate_rps * service_s
    size = 400
    arrivals = np.zeros(size)
    arrivals[0] = np.exp(-load)
    for k in range(1, size):
        arrivals[k] = arrivals[k - 1] * load / k
    here = np.zeros(size)
    here[0] = 1.0
    for _ in range(4000):
        left = np.concatenate(([here[: servers + 1].sum()], here[servers + 1 :], np.zeros(servers)))
        following = np.convolve(left, arrivals)[:size]
        following /= following.sum()
        if np.abs(following - here).max() < 1e-13:
            break
        here = following
    queue = float((np.maximum(0, np.arange(size) - servers) * here).sum())
    return queue / rate_rps


def test_one_slot_waits_exactly_as_the_recursion_of_one_server() -> None:
    dice = np.random.default_rng(3)
    service = np.maximum(1, np.round(dice.exponential(300.0, 5000))).astype(int)
    arrivals_s = np.cumsum(dice.exponential(300.0 * TICK_S / 0.8, 5000))
    expected = lindley_s(arrivals_s, service * TICK_S)
    assert waits_s(arrivals_s, service, 1) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("servers", [2, 4, 16])
def test_c_slots_wait_as_c_servers_to_within_one_iteration(servers: int) -> None:
    """An arrival waits for the end of the iteration under way, which c separate servers would not make it do."""
    ticks = 4096
    gap_s = ticks * TICK_S / servers / 0.85
    arrivals_s = np.cumsum(np.random.default_rng(5).exponential(gap_s, 4000))
    measured = waits_s(arrivals_s, np.full(4000, ticks), servers)
    expected = earliest_free_s(arrivals_s, ticks * TICK_S, servers)
    assert measured.mean() > gap_s / 10
    assert np.abs(measured - expected).max() <= TICK_S


def luck_s(waits: np.ndarray, gaps_s: np.ndarray, services_s: np.ndarray, drift_s: float) -> float:
    """How far chance alone took the mean of measured waits from its expectation, in the largest part; 0 on average.

    With x, a service less the gap to the next arrival, and y, the idle time before that, w' = w + x + y, and w' y = 0.
    So w'² = w² + 2 w x + x² − y², and over a long run, where the squares of w cancel, with E x = −drift

        mean(w) = (mean(x²) − mean(y²)) / (2 · drift) + mean(w · (x + drift)) / drift.

    Whoever waits has waited before its x is drawn: the last term is 0 on average, whatever the mean wait is, and taking
    it away leaves the mean where it was, with less chance in it.
    """
    x = services_s[:-1] - gaps_s[1:]
    return float((waits[:-1] * (x + drift_s)).mean() / drift_s)


@pytest.mark.parametrize("load", [0.5, 0.7])
def test_exponential_service_in_one_slot_waits_as_m_m_1(load: float) -> None:
    count, mean_ticks = 200_000, 400.0
    mean_s = mean_ticks * TICK_S
    dice = np.random.default_rng(20)
    gaps_s, services = dice.exponential(mean_s / load, count), dice.exponential(mean_ticks, count)
    # Whole ticks: half a tick less than exponential, rounded up, has the same mean.
    ticks = np.maximum(1, np.ceil(services - 0.5)).astype(int)
    waits = waits_s(np.cumsum(gaps_s), ticks, 1)
    mean_wait_s = waits.mean() - luck_s(waits, gaps_s, ticks * TICK_S, mean_s / load - mean_s)
    assert mean_wait_s == pytest.approx(load / (1 - load) * mean_s, rel=0.02)


@pytest.mark.parametrize(("servers", "load"), [(2, 0.7), (4, 0.8), (8, 0.8)])
def test_fixed_service_in_c_slots_waits_as_m_d_c(servers: int, load: float) -> None:
    """Chance is taken out by what one server of c times the speed would wait with the same arrivals, whose mean is
    known (Pollaczek and Khinchine).
    """
    count, ticks = 60_000, 4096
    service_s = ticks * TICK_S
    gap_s = service_s / servers / load
    gaps_s = np.random.default_rng(7).exponential(gap_s, count)
    measured = waits_s(np.cumsum(gaps_s), np.full(count, ticks), servers).mean()
    fast_s = service_s / servers
    luck_s = one_server_s(gaps_s, np.full(count, fast_s)) - load / (2 * (1 - load)) * fast_s
    assert measured - luck_s == pytest.approx(mdc_wait_s(1 / gap_s, service_s, servers), rel=0.02)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.9])
def test_the_theory_of_m_d_c_is_pollaczek_khinchine_for_one_server(load: float) -> None:
    assert mdc_wait_s(load, 1.0, 1) == pytest.approx(load / (2 * (1 - load)), rel=1e-6)
