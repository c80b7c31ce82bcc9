"""Scrape targets: what file_sd documents and actuators list, as one entry per server.

Of a document the labels ``service``, ``role``, ``replica``, ``cluster``, ``node``, ``gpus`` and ``gpu_indices`` place a
target (``trimtab.config.file_sd``). A replica without a name goes by its address; it has one GPU by default.
``exporter: dcgm`` marks the GPU exporter of a node.

Actuators are the reference: where one is configured, only replicas that it lists as routable count. Without any, every
target with a service and a role counts. What does not count is scraped and shown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.common.v1 import types_pb2
from trimtab.config.file_sd import FileSdTarget
from trimtab.domain.vocabulary import Role

FILE_SD = "file_sd"
HTTP_SD = "http_sd"

ROLES: Mapping[str, "types_pb2.Role.ValueType"] = {role.value: types_pb2.Role.ValueType(role.number) for role in Role}
"""As people write it, such as ``prefill-ffn`` → as the API has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleKey:
    """One role of one service. Role 0 is the front door."""

    service: str
    role: "types_pb2.Role.ValueType"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One server, or the GPU exporter of one node (``exporter``, "dcgm"), which is scraped and never counted.

    ``address`` is http://host:port, empty while it has none. Role 0 is unknown. ``gpu_indices`` are those of ``node``
    that the server uses. ``metrics_path`` is where its page lies; empty for the dialect's own.
    """

    target_id: str
    address: str
    service: str
    role: "types_pb2.Role.ValueType"
    replica: str
    cluster: str
    gpus: int
    source: str
    counted: bool
    routable_by_actuator: bool = False
    node: str = ""
    gpu_indices: tuple[int, ...] = ()
    exporter: str = ""
    metrics_path: str = ""

    @property
    def placed(self) -> bool:
        """Whether it is known which service and role its load belongs to."""
        return bool(self.service) and self.role != types_pb2.ROLE_UNSPECIFIED and not self.exporter

    @property
    def key(self) -> RoleKey:
        """The role that it belongs to."""
        return RoleKey(service=self.service, role=self.role)


def from_file_sd(listed: FileSdTarget, *, source: str = FILE_SD) -> Target:
    """The target of an entry of a document, which is a file's or, as ``source`` says, an HTTP server's.

    ``counted`` is set when it is placed; ``merge_targets`` clears it where an actuator decides.
    """
    labels = listed.labels
    return Target(
        target_id=listed.replica,
        address=listed.url,
        service=labels.service,
        role=ROLES[labels.role.value] if labels.role is not None else types_pb2.ROLE_UNSPECIFIED,
        replica=listed.replica,
        cluster=labels.cluster,
        gpus=labels.gpus if labels.gpus is not None else len(labels.gpu_indices) or 1,
        source=source,
        counted=bool(labels.service) and labels.role is not None and not labels.exporter,
        node=labels.node,
        gpu_indices=labels.gpu_indices,
        exporter=labels.exporter,
        metrics_path=labels.metrics_path,
    )


def from_replica(replica: actuator_pb2.Replica, *, cluster: str) -> Target:
    """The target of a replica that the actuator of ``cluster`` lists."""
    routable = replica.routable
    return Target(
        target_id=replica.replica,
        address=replica.address.rstrip("/"),
        service=replica.service,
        role=replica.role,
        replica=replica.replica,
        cluster=replica.cluster or cluster,
        gpus=len(replica.gpu_indices),
        source=f"actuator/{replica.cluster or cluster}",
        counted=routable and bool(replica.service) and replica.role != types_pb2.ROLE_UNSPECIFIED,
        routable_by_actuator=routable,
        node=replica.node,
        gpu_indices=tuple(replica.gpu_indices),
    )


def merge_targets(
    from_files: Sequence[Target], from_actuators: Sequence[Target], *, actuators_configured: bool
) -> dict[str, Target]:
    """One entry per server, by id in sorted order. An actuator's replica replaces a file's target of the same name or
    address; a replica that two actuators list is kept under the first cluster's name."""
    merged: dict[str, Target] = {}
    taken: set[str] = set()
    for target in sorted(from_actuators, key=lambda item: (item.target_id, item.source)):
        if target.target_id not in merged:
            merged[target.target_id] = target
            taken.add(target.address)
    for target in sorted(from_files, key=lambda item: item.target_id):
        if target.target_id in merged or target.address in taken:
            continue
        merged[target.target_id] = replace(target, counted=target.counted and not actuators_configured)
        taken.add(target.address)
    return {target_id: merged[target_id] for target_id in sorted(merged)}
