"""The pools of ``bench.wake``: one on a node of its own for each cell, idle or with a donor, armed or put back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.config.resources import Resource, ServicePolicy, parse_document

FAST_S = 1.0
DRAIN_S = 1.0
PROFILE = "a100-8b-tp1"
NODE_GPUS = 3


@dataclass(frozen=True)
class Cell:
    """One pool on one node: the service that steps, and the donor where there is one."""

    kind: str
    number: int

    @property
    def service(self) -> str:
        """The one that steps."""
        return f"{self.kind}-{self.number}"

    @property
    def donor(self) -> str:
        """The donor; empty where a GPU is idle."""
        return f"giver-{self.number}" if self.kind == "donor" else ""

    @property
    def node(self) -> str:
        """Its own."""
        return f"node-{self.kind}-{self.number}"

    def resources(self, *, armed: bool) -> list[Resource]:
        """Armed, the service may have a second server; else it has one, and the donor its two. What falls is first."""
        receiver = _policy(self.service, low=1, high=2 if armed else 1, theta_tps=200.0)
        if not self.donor:
            return [receiver]
        return [receiver, _policy(self.donor, low=1 if armed else 2, high=2, theta_tps=1.0)]

    def pool(self) -> Resource:
        """The pool over the node's GPUs."""
        gpus = [0, 1, 2] if self.donor else [0, 1]
        members: list[dict[str, Any]] = [{"service": self.service, "initialAwake": 1}]
        if self.donor:
            members.append({"service": self.donor, "initialAwake": 2})
        spec = {
            "cluster": "local",
            "gpus": [{"node": self.node, "gpuIndices": gpus}],
            "members": members,
            "rescueIntervalS": FAST_S,
            "rebalanceIntervalS": 2 * FAST_S,
            "residenceS": 0,
            "drainTimeoutS": DRAIN_S,
        }
        name = f"pool-{self.service}"
        return parse_document(document("Pool", name, spec))


def document(kind: str, name: str, spec: Mapping[str, object]) -> dict[str, object]:
    """A resource in YAML."""
    return {"apiVersion": "trimtab.dev/v1", "kind": kind, "metadata": {"name": name}, "spec": dict(spec)}


def _policy(name: str, *, low: int, high: int, theta_tps: float) -> ServicePolicy:
    role = {"role": "colocated", "minReplicas": low, "maxReplicas": high, "gpusPerReplica": 1, "profile": PROFILE}
    spec = {
        "model": f"model-{name}",
        "slo": {"ttftS": 2.0, "tpotS": 0.075},
        "roles": [role],
        "tokenServiceShare": {"thetaTps": theta_tps},
    }
    parsed = parse_document(document("ServicePolicy", name, spec))
    if not isinstance(parsed, ServicePolicy):
        raise TypeError("a ServicePolicy parses to one")
    return parsed
