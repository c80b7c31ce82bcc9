"""Scrape targets: what file_sd documents and actuators list, as one entry per server.

A file_sd document is a list of groups, ``{"targets": ["host:port", …], "labels": {…}}``. The labels ``service``,
``role``, ``replica``, ``cluster`` and ``gpus`` place a target, ``__scheme__`` is http or https; others are ignored,
since the same file may serve Prometheus.

Actuators are the reference: where one is configured, only replicas that it lists as routable count. Without any, every
target with a service and a role counts. What does not count is scraped and shown.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.common.v1 import types_pb2
from trimtab.words import Role

FILE_SD = "file_sd"
MAX_TARGETS_PER_FILE = 100_000

ROLES: Mapping[str, "types_pb2.Role.ValueType"] = {role.value: types_pb2.Role.ValueType(role.number) for role in Role}
"""As people write it, such as ``prefill-ffn`` → as the API has it."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_MAX_TARGET_ID = 253


class TargetsError(Exception):
    """A targets document is refused; the message says where it is wrong and what would be right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One server. ``address`` is http://host:port, empty while it has none. Role 0 is unknown."""

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

    @property
    def placed(self) -> bool:
        """Whether it is known which service and role its load belongs to."""
        return bool(self.service) and self.role != types_pb2.ROLE_UNSPECIFIED


def parse_file_sd(document: object, *, file: str) -> tuple[Target, ...]:
    """The targets of one document, as read from JSON or YAML, by id. Raises ``TargetsError``.

    ``counted`` is set for every target that is placed; ``merge_targets`` takes it back where an actuator decides.
    """
    if not isinstance(document, list):
        raise TargetsError(f"{file}: expected a list of groups, each with targets and labels")
    found: dict[str, Target] = {}
    addresses: dict[str, str] = {}
    for index, group in enumerate(document):
        for target in _group(group, place=f"{file}: [{index}]"):
            known = found.get(target.target_id)
            if known == target:
                continue
            if known is not None:
                raise TargetsError(f"{file}: [{index}]: {target.target_id!r} is listed twice, differently")
            if target.address in addresses:
                raise TargetsError(
                    f"{file}: [{index}]: {target.address} is listed for {addresses[target.address]!r} and for "
                    f"{target.target_id!r}"
                )
            found[target.target_id] = target
            addresses[target.address] = target.target_id
    if len(found) > MAX_TARGETS_PER_FILE:
        raise TargetsError(f"{file}: more than {MAX_TARGETS_PER_FILE} targets")
    return tuple(found[target_id] for target_id in sorted(found))


def _group(group: object, *, place: str) -> list[Target]:
    if not isinstance(group, dict):
        raise TargetsError(f"{place}: expected a mapping with targets and labels")
    addresses = group.get("targets")
    if not isinstance(addresses, list) or not all(isinstance(item, str) for item in addresses):
        raise TargetsError(f"{place}.targets: expected a list of host:port")
    labels = group.get("labels") or {}
    if not isinstance(labels, dict):
        raise TargetsError(f"{place}.labels: expected a mapping of text to text")
    texts = {str(key): str(value) for key, value in labels.items()}
    if texts.get("replica") and len(addresses) > 1:
        raise TargetsError(f"{place}.labels.replica: one replica cannot have {len(addresses)} targets")
    return [_target(address, texts, place=f"{place}.targets[{index}]") for index, address in enumerate(addresses)]


def _target(address: str, labels: Mapping[str, str], *, place: str) -> Target:
    scheme = labels.get("__scheme__", "http")
    if scheme not in ("http", "https"):
        raise TargetsError(f"{place}: __scheme__ is {scheme!r}, must be http or https")
    host_and_port = _host_and_port(address, place=place)
    service = labels.get("service", "")
    if service and _NAME.fullmatch(service) is None:
        raise TargetsError(f"{place}: label service is {service!r}; a name has lower-case letters, digits and hyphens")
    role_name = labels.get("role", "")
    if role_name and role_name not in ROLES:
        raise TargetsError(f"{place}: label role is {role_name!r}, must be one of {', '.join(ROLES)}")
    gpus = labels.get("gpus", "1")
    if not (gpus.isascii() and gpus.isdigit() and int(gpus) <= 1024):
        raise TargetsError(f"{place}: label gpus is {gpus!r}, must be a number from 0 to 1024")
    replica = labels.get("replica", "") or host_and_port
    if len(replica) > _MAX_TARGET_ID or not replica.isprintable():
        raise TargetsError(f"{place}: label replica is {replica[:80]!r}, which is no name")
    role = ROLES[role_name] if role_name else types_pb2.ROLE_UNSPECIFIED
    return Target(
        target_id=replica,
        address=f"{scheme}://{host_and_port}",
        service=service,
        role=role,
        replica=replica,
        cluster=labels.get("cluster", ""),
        gpus=int(gpus),
        source=FILE_SD,
        counted=bool(service) and role != types_pb2.ROLE_UNSPECIFIED,
    )


def _host_and_port(address: str, *, place: str) -> str:
    wanted = "must be host:port"
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise TargetsError(f"{place}: {address[:80]!r} {wanted}") from None
    if not host or port is None or parts.netloc != address or "@" in address or not address.isprintable():
        raise TargetsError(f"{place}: {address[:80]!r} {wanted}")
    return address


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
