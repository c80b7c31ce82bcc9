"""Settings of the actuator."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from actuator.core.model import Limits
from trimtab.config.settings import Address, ServiceSettings


class ActuatorSettings(ServiceSettings):
    """The actuator owns existence, GPUs, life cycle and visibility of one cluster's replicas."""

    listen: Address = Field("127.0.0.1:7004", description="gRPC address")
    metrics_listen: Address = Field("127.0.0.1:9004", description="address of /metrics (HTTP)")
    cluster: str = Field("local", pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", description="name of the cluster")
    backend: Literal["local", "static"] = Field(
        "local", description="local: servers made through a fleet's admin API; static: servers of a file"
    )
    fleet_url: str = Field("http://127.0.0.1:8090", description="admin API of the fleet (backend local)")
    targets_file: Path | None = Field(None, description="file_sd document of running servers (backend static)")
    observe_interval_s: float = Field(1.0, ge=0.05, le=60, description="time between two looks at everything")
    urgent_interval_s: float = Field(0.25, ge=0.02, le=10, description="time between looks at replicas in an operation")
    probe_timeout_s: float = Field(2.0, gt=0, le=60, description="a server that takes longer did not answer")
    canary_timeout_s: float = Field(20.0, gt=0, le=600, description="how long a canary token may take")
    gateway_lease_s: float = Field(3.0, ge=0.3, le=60, description="a gateway that is silent for longer counts no more")
    lease_ttl_s: float = Field(3.0, ge=0.3, le=60, description="how long a silent actuator stays the writer")
    default_drain_s: float = Field(30.0, ge=0, le=3600, description="drain time where the pool does not say one")
    pinned_wait_s: float = Field(
        60.0, ge=0, le=3600, description="wait for requests that cannot be continued elsewhere"
    )
    release_wait_s: float = Field(
        10.0, ge=0, le=3600, description="the same for a release of a pool, before another donor is looked for"
    )
    acknowledge_timeout_s: float = Field(
        10.0, gt=0, le=600, description="a release that a living gateway does not confirm for so long is given up"
    )
    guard_waiting_growth: float = Field(
        8.0,
        ge=0,
        le=10_000,
        description="a release is taken back when each replica that stays has so many more waiting",
    )
    guard_kv_usage: float = Field(
        0.98, gt=0, le=1, description="a release is taken back when one that stays uses more of its KV cache"
    )
    prewarm_after_s: float = Field(
        30.0, ge=0, le=86_400, description="a pool is quiet for so long before a cold replica of it is pre-warmed"
    )
    prewarm_backoff_s: float = Field(
        60.0, ge=0, le=3600, description="pause after a pre-warming that failed; twice as long after each further one"
    )
    starting_timeout_s: float = Field(600.0, gt=0, le=7200, description="a new server must be ready by then")
    sleep_timeout_s: float = Field(90.0, gt=0, le=600, description="a server must be asleep by then")
    wake_timeout_s: float = Field(60.0, gt=0, le=600, description="a server must be awake by then")
    misses_before_unknown: int = Field(3, ge=1, le=100, description="silent looks in a row until a server is UNKNOWN")
    sleeper_hbm_gib: float = Field(2.5, ge=0, le=100, description="HBM that a sleeper may keep on each of its GPUs")
    hbm_slack_gib: float = Field(1.0, ge=0, le=100, description="HBM in use on a GPU that still counts as free")

    gpu_exporter_interval_s: float = Field(
        30.0, ge=0, le=600, description="collection interval of the DCGM exporters: so old may be what they show"
    )

    @model_validator(mode="after")
    def _check_backend(self) -> "ActuatorSettings":
        if self.backend == "static" and self.targets_file is None:
            raise ValueError("backend static needs targets_file")
        if not self.fleet_url.startswith(("http://", "https://")):
            raise ValueError("fleet_url starts with http:// or https://")
        return self

    def limits(self) -> Limits:
        """The bounds as the core takes them."""
        return Limits(
            starting_s=self.starting_timeout_s,
            reactivating_s=self.wake_timeout_s,
            sleeping_s=self.sleep_timeout_s,
            default_drain_s=self.default_drain_s,
            pinned_wait_s=self.pinned_wait_s,
            release_wait_s=self.release_wait_s,
            acknowledge_s=self.acknowledge_timeout_s,
            guard_waiting_growth=self.guard_waiting_growth,
            guard_kv_usage=self.guard_kv_usage,
            prewarm_after_s=self.prewarm_after_s,
            prewarm_backoff_s=self.prewarm_backoff_s,
            gateway_lease_s=self.gateway_lease_s,
            gateway_grace_s=2 * self.gateway_lease_s,
            misses_before_unknown=self.misses_before_unknown,
            fresh_s=2 * self.observe_interval_s + self.probe_timeout_s + 1.0,
            sleeper_hbm_gib=self.sleeper_hbm_gib,
            hbm_slack_gib=self.hbm_slack_gib,
        )
