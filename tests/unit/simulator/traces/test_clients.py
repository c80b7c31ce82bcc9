"""Made-up clients burst, but not all at once."""

import numpy as np

from simulator.traces.generators import Curve
from simulator.traces.servegen import ClientMix, made_up_clients, requests_of_clients


def test_bursts_of_many_clients_do_not_begin_with_their_windows() -> None:
    mix = ClientMix(clients=100, total_rps=5.0, cv_median=4.0)
    made = made_up_clients(mix, curve=Curve(((0.0, 1.0),)), duration_s=36_000.0, seed=3)
    arrivals = [one.arrival_s for one in requests_of_clients(made, service="s", seed=3, duration_s=36_000.0)]
    assert arrivals == sorted(arrivals)
    in_window_s = np.array(arrivals) % mix.window_s
    share_of_first_twentieth = float(np.mean(in_window_s < mix.window_s / 20))
    assert 0.035 < share_of_first_twentieth < 0.065
    gaps = np.diff(arrivals)
    assert float(np.std(gaps) / np.mean(gaps)) > 1.2, "the whole still is burstier than Poisson arrivals"
