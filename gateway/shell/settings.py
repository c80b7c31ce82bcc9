"""Settings of the gateway. `listen` is its HTTP address."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, model_validator

from trimtab.config.settings import Address, Name, ServiceSettings


class GatewaySettings(ServiceSettings):
    """Gateway: routes /v1 requests to routable replicas."""

    listen: Address = Field("127.0.0.1:8080", description="HTTP address of /v1")
    metrics_listen: Address = Field("127.0.0.1:9080", description="address of /metrics; the HTTP address has it too")
    name: Name = Field("gateway-0", description="unique per gateway; a restart under it takes over its lease")
    actuators: dict[Name, Address] = Field(
        {"local": "127.0.0.1:7004"},
        description="gRPC address of each cluster's actuator, to follow its stream; none when only registry is given",
    )
    registry: list[Name] = Field(
        [], description="clusters to follow by the registry in the store (store_url), beside the stream or without it"
    )
    collector: Address = Field("127.0.0.1:7001", description="gRPC address that demand is reported to")
    services: list[Name] = Field([], description="services to hold requests for before any actuator lists them")
    max_held_per_service: int = Field(2000, ge=0, le=100_000, description="requests held for want of a replica")
    max_hold_s: float = Field(60.0, gt=0, le=3600, description="longest wait for a routable replica")
    idle_timeout_s: float = Field(60.0, gt=0, le=3600, description="a server silent for longer has failed the request")
    connect_timeout_s: float = Field(2.0, gt=0, le=60, description="a server that cannot be connected to has failed")
    avoid_s: float = Field(1.0, gt=0, le=60, description="how long a replica that failed a request is avoided at first")
    acknowledge_s: float = Field(
        0.5, gt=0, le=10, description="pause between two acknowledgements; must be below the lease"
    )
    demand_s: float = Field(1.0, gt=0, le=10, description="pause between two demand reports")
    max_body_bytes: int = Field(16 * 1024 * 1024, ge=1024, description="largest request body")

    @model_validator(mode="before")
    @classmethod
    def _follow_the_registry_alone(cls, given: object) -> object:
        """The default actuator applies only where no cluster is named at all."""
        alone = isinstance(given, Mapping) and given.get("registry") and "actuators" not in given
        return {**given, "actuators": {}} if isinstance(given, Mapping) and alone else given

    @model_validator(mode="after")
    def _check_clusters(self) -> GatewaySettings:
        if not self.actuators and not self.registry:
            raise ValueError("actuators or registry has to name a cluster")
        return self

    @property
    def clusters(self) -> tuple[str, ...]:
        """Every cluster that is followed, sorted."""
        return tuple(sorted({*self.actuators, *self.registry}))
