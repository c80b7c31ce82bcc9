"""Settings of the collector."""

import math
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from metrics_collector.core.page import MAX_PAGE_BYTES
from metrics_collector.core.targets import ROLES
from metrics_collector.core.window import window_length_s
from metrics_collector.shell.client import Gzip
from metrics_collector.shell.http_sd import MAX_ANSWER_BYTES
from trimtab.api.common.v1 import types_pb2
from trimtab.config.settings import Address, Name, ServiceSettings

_TIMEOUT_SHARE = 0.8
_LEAST_ROWS, _MOST_ROWS = 8, 24
Interval = Annotated[float, Field(ge=0.1, le=60)]


class CollectorSettings(ServiceSettings):
    """Metrics collector: scrapes vLLM servers and publishes each role's window."""

    listen: Address = Field("127.0.0.1:7001", description="gRPC address")
    metrics_listen: Address = Field("127.0.0.1:9001", description="address of /metrics (HTTP)")
    collector_name: Name = Field("collector-0", description="name of this collector, unique among those of a store")
    actuators: dict[Name, Address] = Field({}, description="cluster=host:port of the actuators, the reference")
    targets_files: list[Path] = Field([], description="Prometheus file_sd documents, JSON or YAML; re-read on change")
    targets_urls: list[str] = Field([], description="Prometheus http_sd URLs, which answer with a JSON document")
    http_sd_interval_s: float = Field(30.0, ge=0.1, le=3600, description="from one asking of a URL to the next")
    http_sd_timeout_s: float = Field(10.0, gt=0, le=600, description="bound of one answer")
    http_sd_max_bytes: int = Field(MAX_ANSWER_BYTES, ge=1024, le=MAX_ANSWER_BYTES, description="largest answer")
    http_sd_ca_file: Path | None = Field(None, description="PEM CA of https URLs; default: the system's authorities")
    http_sd_token_file: Path | None = Field(None, description="bearer token for the URLs; read with every request")
    share_targets: bool = Field(True, description="share targets with collectors of the same store and sources")
    targets_poll_s: float = Field(1.0, ge=0.05, le=600, description="how often the files are looked at")
    scrape_interval_s: Interval = Field(1.0, description="from scrape to scrape, and window to window")
    scrape_interval_by_service: dict[Name, Interval] = Field({}, description="service=seconds, where it is another")
    scrape_timeout_s: float = Field(0.8, gt=0, le=60, description="bound of one scrape; below the interval")
    scrape_gzip: Gzip = Field(Gzip.AUTO, description="ask for packed full pages: of other machines, always or never")
    scrape_token_file: Path | None = Field(None, description="bearer token for targets; re-read on change")
    scrape_token_file_by_service: dict[Name, Path] = Field({}, description="service=file, where the token is another")
    scrape_tls_ca_file: Path | None = Field(
        None, description="PEM CA of targets under https://; default: the system's authorities"
    )
    scrape_tls_server_name: str | None = Field(None, description="name in the targets' certificates, if not the host's")
    scrape_tls_insecure_skip_verify: bool = Field(False, description="do not check the targets' certificates")
    window_s: float = Field(5.0, ge=0.2, le=600, description="length of the sliding window; at least two intervals")
    max_page_bytes: int = Field(MAX_PAGE_BYTES, ge=1024, le=MAX_PAGE_BYTES, description="largest page, unpacked")
    max_backoff_s: float = Field(5.0, ge=0, le=600, description="longest pause between scrapes of a failing target")
    filter_pages: bool = Field(True, description="ask /metrics/?name[]=… first; the full page where that is 404")
    dialect_files: list[Path] = Field([], description="mappings of engines that are not shipped, YAML; first one first")
    stuck_after_s: float = Field(
        10.0, gt=0, le=3600, description="longest iteration: gauges that stand longer are stuck"
    )
    stuck_after_by_role: dict[str, float] = Field({}, description="role=seconds, where a role's iterations are longer")
    actuator_lost_after_s: float = Field(5.0, gt=0, le=600, description="silence after which an actuator is lost")
    demand_expiry_s: float = Field(3.0, gt=0, le=600, description="silence after which a gateway's demand is dropped")
    history_windows: int = Field(3600, ge=1, le=100_000, description="windows kept per role and collector")
    history_retention_s: float = Field(3600.0, gt=0, description="how long windows are kept")

    @field_validator("targets_urls")
    @classmethod
    def _check_urls(cls, urls: list[str]) -> list[str]:
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"{url[:80]!r} must be a URL such as http://inventory:8000/targets")
        return urls

    @model_validator(mode="after")
    def _check_times(self) -> "CollectorSettings":
        if self.scrape_timeout_s >= self.scrape_interval_s:
            raise ValueError("scrape_timeout_s must be below scrape_interval_s")
        if self.window_s < 2 * self.scrape_interval_s:
            raise ValueError("window_s must hold at least two scrapes: twice scrape_interval_s")
        if self.stuck_after_s < self.scrape_interval_s:
            raise ValueError("stuck_after_s is shorter than scrape_interval_s: every gauge would look stuck")
        for role, seconds in self.stuck_after_by_role.items():
            if role not in ROLES:
                raise ValueError(f"stuck_after_by_role: {role!r} is none of {', '.join(ROLES)}")
            if not self.scrape_interval_s <= seconds <= 3600:
                raise ValueError(f"stuck_after_by_role: {role} must lie between scrape_interval_s and 3600")
        shortest_s = min([self.stuck_after_s, *self.stuck_after_by_role.values()])
        for service, interval_s in self.scrape_interval_by_service.items():
            if shortest_s < interval_s:
                raise ValueError(
                    f"scrape_interval_by_service: {service} is scraped every {interval_s:g} s, but gauges count as "
                    f"stuck after {shortest_s:g} s: raise stuck_after_s and stuck_after_by_role"
                )
        return self

    def sources(self) -> list[str]:
        """Where targets come from, and how they are read: collectors with the same ones may share targets."""
        found = [f"actuator {cluster}" for cluster in self.actuators]
        found += [f"file {path}" for path in self.targets_files]
        found += [f"url {url}" for url in self.targets_urls]
        found.append(f"interval {self.scrape_interval_s:g} {sorted(self.scrape_interval_by_service.items())}")
        return found if self.share_targets else [*found, f"alone {self.collector_name}"]

    def interval_of(self, service: str) -> float:
        """From scrape to scrape and from window to window of a service, in seconds."""
        return self.scrape_interval_by_service.get(service, self.scrape_interval_s)

    def timeout_of(self, service: str) -> float:
        """Bound of one scrape of a service in seconds, below its interval."""
        return min(self.scrape_timeout_s, _TIMEOUT_SHARE * self.interval_of(service))

    def window_s_at(self, interval_s: float) -> float:
        """Length in seconds of the windows of services that are scraped every ``interval_s``: two scrapes fit in."""
        return window_length_s(self.window_s, interval_s)

    @property
    def longest_interval_s(self) -> float:
        """Of all services, in seconds."""
        return max([self.scrape_interval_s, *self.scrape_interval_by_service.values()])

    @property
    def ring_rows(self) -> int:
        """Rows that are kept of a target: a window's scrapes at the shortest interval, within bounds."""
        shortest_s = min([self.scrape_interval_s, *self.scrape_interval_by_service.values()])
        return max(_LEAST_ROWS, min(_MOST_ROWS, math.ceil(self.window_s / shortest_s) + 4))

    def stuck_after(self, role: "types_pb2.Role.ValueType") -> float:
        """Longest iteration of a role, in seconds."""
        for name, seconds in self.stuck_after_by_role.items():
            if ROLES[name] == role:
                return seconds
        return self.stuck_after_s
