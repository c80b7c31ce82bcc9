"""Settings of the pre-scheduler."""

from pydantic import Field

from trimtab.config.settings import Address, ServiceSettings


class PreSchedulerSettings(ServiceSettings):
    """The pre-scheduler maps scaling requests onto nodes."""

    listen: Address = Field("127.0.0.1:7003", description="gRPC address")
    metrics_listen: Address = Field("127.0.0.1:9003", description="address of /metrics (HTTP)")
    actuators: dict[str, Address] = Field(
        default_factory=lambda: {"local": "127.0.0.1:7004"},
        min_length=1,
        max_length=256,
        description="cluster=host:port of every cluster's actuator",
    )
    cycle_s: float = Field(5.0, ge=0.1, le=600, description="time between two scheduling cycles")
    kick_poll_s: float = Field(0.5, ge=0.05, le=60, description="how often to look for changed requests in between")
    actuator_timeout_s: float = Field(2.0, gt=0, le=60, description="a cluster that takes longer is left out")
    placement_ttl_s: float = Field(10.0, gt=0, le=600, description="an actuator refuses a placement older than this")
    retry_placement_s: float = Field(
        5.0, ge=0, le=600, description="wait before a decision places replicas again that are gone; doubles each time"
    )
    lease_ttl_s: float = Field(3.0, ge=0.3, le=60, description="how long a leader that fell silent stays leader")
    kept_cycles: int = Field(1000, ge=1, le=100_000, description="cycles kept in the store")
