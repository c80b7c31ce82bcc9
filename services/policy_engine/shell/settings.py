"""Settings of the policy engine."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from trimtab.config.fields import Name
from trimtab.config.settings import Address, ServiceSettings


class EngineSettings(ServiceSettings):
    """Policy engine: decides replica counts and awake sets, records why, and publishes them."""

    listen: Address = Field("127.0.0.1:7002", description="gRPC address")
    metrics_listen: Address = Field("127.0.0.1:9002", description="address of /metrics (HTTP)")
    actuators: dict[Name, Address] = Field({}, description="cluster=host:port of every cluster's actuator")
    tick_interval_s: float = Field(1.0, ge=0.05, le=60, description="how often pools are looked at; they say when due")
    scaled_interval_s: float = Field(5.0, ge=0.05, le=600, description="how often scaled services are decided on")
    lease_ttl_s: float = Field(3.0, ge=0.5, le=60, description="a leader that is silent for so long is replaced")
    actuator_lost_after_s: float = Field(3.0, gt=0, le=600, description="silence after which an actuator is lost")
    publish_expiry_s: float = Field(30.0, gt=0, le=3600, description="what is published is valid for so long")
    decisions_kept: int = Field(1000, ge=10, le=100_000, description="decision records kept of each service and pool")
    decisions_kept_in_all: int = Field(
        5000, ge=10, le=1_000_000, description="decision records kept in all; beyond it those with the most give way"
    )
    bootstrap_dir: Path | None = Field(None, description="YAML resources to apply at the start where they are absent")
