"""What was last seen of the world: the backend's lists and each server's answers. Never stored."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from actuator.core.model import ActionKind, Gpu, PlacedSpec, Placement, Spec


class RunState(StrEnum):
    """The state of a server's process, by the backend."""

    STARTING = "starting"
    RUNNING = "running"
    EXITED = "exited"


@dataclass(frozen=True, kw_only=True)
class Listed:
    """One replica as the backend lists it."""

    spec: Spec
    placement: Placement
    address: str
    run_state: RunState
    # 0 when the backend does not know.
    start_time_s: float = 0.0
    host_memory_gib: float | None = None

    @property
    def placed(self) -> PlacedSpec:
        """What it is, and where it lives."""
        return PlacedSpec(spec=self.spec, placement=self.placement)


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node of the cluster and where it is in the topology."""

    node: str
    vdc: str
    s2: str
    s1: str
    gpu_type: str
    gpus: int
    # GPUs that the backend itself regards as taken, by whomever.
    taken: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """Measured memory of one GPU."""

    used_gib: float
    memory_gib: float
    as_of_s: float


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """What one server answered when it was last asked."""

    as_of_s: float
    # /health answered 200.
    healthy: bool
    # Consecutive probes without an answer; 0 when it answered.
    misses: int = 0
    # Nothing listens at its address.
    refused: bool = False
    # None when it could not be read, or when the server has no such route.
    sleeping: bool | None = None
    # Asleep for /is_sleeping, but only paused: memory is not free.
    paused: bool = False
    # Running and waiting requests; None when it could not be read.
    in_flight: int | None = None
    # Waiting requests alone, and the share of its KV cache in use; None when the server does not report them.
    waiting: int | None = None
    kv_usage: float | None = None
    # The level at which the server reports that it sleeps; None when it does not report it, or is awake.
    sleep_level: int | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class World:
    """The newest look at everything."""

    # None until the backend answered once.
    listed: Mapping[str, Listed] | None = None
    listed_as_of_s: float = 0.0
    nodes: Mapping[str, Node] = field(default_factory=dict)
    gpu_memory: Mapping[Gpu, GpuMemory] = field(default_factory=dict)
    # Whether this backend can measure GPU memory at all.
    measures_gpus: bool = False
    # Nodes whose GPUs are measured where only some are; None: all.
    measured_nodes: frozenset[str] | None = None
    probes: Mapping[str, ProbeResult] = field(default_factory=dict)
    # Replicas that the shell is acting on right now.
    busy: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Action:
    """One action for the shell. Idempotent: after a crash it is done again."""

    kind: ActionKind
    replica: str
    address: str = ""
    # For CREATE: what to create, and where.
    placed: PlacedSpec | None = None
    # For SLEEP: how deep. For WAKE: how deep it slept; at level 2 its weights have to be loaded again.
    sleep_level: int = 1
    model: str = ""
    # Since when the replica's record has been in its state, as the core asked.
    since_s: float = 0.0
    # For SLEEP: it was asked before, and that call may be under way.
    repeated: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of an action. ``permanent``: trying again will not help. ``busy``: refused, requests are in flight.

    ``unsettled``: it failed, and whether the server will still carry it out is not known.
    """

    kind: ActionKind
    replica: str
    ok: bool
    error: str = ""
    permanent: bool = False
    busy: bool = False
    unsettled: bool = False
    # What a canary's server calls its model.
    served_model: str = ""
    # What was asked; None: just now, for the first time.
    action: Action | None = None
