"""What controllers are shown beside windows: a service's traffic since their last turn, and servers' last samples."""

from __future__ import annotations

from collections.abc import Sequence

from lab.virtual.control import ReplicaSample, ServiceTraffic
from lab.virtual.gateway import Demand
from lab.virtual.servers import VirtualServers
from simulator.core.requests import EngineGauges, FinishedRequest


class Tally:
    """A service's traffic since the controller's last turn."""

    def __init__(self) -> None:
        self._since_s = 0.0
        self._arrivals = self._prompt_tokens = self._output_tokens = self._held = 0
        self._ttft_s: list[float] = []
        self._itl_s: list[float] = []

    def add(self, item: Demand) -> None:
        """What arrived at the gateway."""
        self._arrivals += item.arrivals
        self._prompt_tokens += item.prompt_tokens
        self._output_tokens += item.output_tokens
        self._held = item.held

    def ended(self, finished: FinishedRequest) -> None:
        """A request ended in the engine that served all of it."""
        first_s = finished.first_token_s
        if first_s is None:
            return
        self._ttft_s.append(first_s - finished.arrival_s)
        self.decoded(finished)

    def prefilled(self, finished: FinishedRequest) -> None:
        """A prompt was computed by a prefill replica."""
        self._ttft_s.append(finished.finished_s - finished.arrival_s)

    def decoded(self, finished: FinishedRequest) -> None:
        """A request got its last token, from a replica that need not have computed its prompt."""
        first_s = finished.first_token_s
        if first_s is not None and finished.generated_tokens > 1:
            self._itl_s.append((finished.finished_s - first_s) / (finished.generated_tokens - 1))

    def close(self, now_s: float) -> ServiceTraffic:
        """The traffic up to now; the next one begins here."""
        found = ServiceTraffic(
            interval_s=max(1e-9, now_s - self._since_s),
            arrivals=self._arrivals,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            held=self._held,
            ttft_s=_mean(self._ttft_s),
            itl_s=_mean(self._itl_s),
        )
        self._since_s = now_s
        self._arrivals = self._prompt_tokens = self._output_tokens = 0
        self._ttft_s, self._itl_s = [], []
        return found


class Sampler:
    """The values of every awake server, scrape by scrape."""

    def __init__(self) -> None:
        self._looks: dict[str, tuple[float, EngineGauges]] = {}

    def take(self, servers: VirtualServers, now_s: float) -> dict[str, ReplicaSample]:
        """By name. Engines must be up to `now_s`."""
        samples: dict[str, ReplicaSample] = {}
        for name, server in servers.by_name.items():
            if not server.awake:
                self.forget(name)
                continue
            engine = servers.clock.engines[server.index]
            gauges = engine.observe(now_s)
            before_s, before = self._looks.get(name, (now_s, gauges))
            self._looks[name] = (now_s, gauges)
            samples[name] = sample_of(
                gauges, before, now_s - before_s, kv_blocks=server.blocks, waiting_kv_blocks=engine.waiting_blocks
            )
        return samples

    def forget(self, name: str) -> None:
        """The server is gone; one of its name begins anew."""
        self._looks.pop(name, None)


def sample_of(
    gauges: EngineGauges, before: EngineGauges, elapsed_s: float, *, kv_blocks: int, waiting_kv_blocks: int
) -> ReplicaSample:
    """The values of an awake server now; rates since the last sample, none at the first one."""
    rates: dict[str, float] = {}
    if elapsed_s > 0:
        generated = gauges.generated_tokens - before.generated_tokens
        computed = gauges.computed_tokens - before.computed_tokens
        rates = {
            "gpu_utilisation_ratio": min(1.0, (gauges.busy_s - before.busy_s) / elapsed_s),
            "output_tps": generated / elapsed_s,
            "prompt_tps": max(0.0, computed - generated) / elapsed_s,
        }
    return ReplicaSample(
        running=gauges.running,
        waiting=gauges.waiting + gauges.deferred,
        kv_usage_ratio=gauges.kv_usage_ratio,
        kv_blocks=kv_blocks,
        waiting_kv_blocks=waiting_kv_blocks,
        **rates,
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
