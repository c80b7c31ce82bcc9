"""What the actuator knows, as frozen records: replicas, pools, operations, gateways.

Everything here is plain data; ``actuator.shell.records`` stores it. Times are seconds on the store's clock.
What is only observed (in-flight counts, health) is in ``actuator.core.world`` and is never stored.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Self

from actuator.core.refused import RefusedRecord
from trimtab.domain.operation import FINISHED as FINISHED
from trimtab.domain.operation import OperationKind as OperationKind
from trimtab.domain.operation import OperationState as OperationState
from trimtab.domain.operation import StepKind as StepKind
from trimtab.domain.pool import Floor as Floor
from trimtab.domain.pool import Gpu as Gpu
from trimtab.domain.pool import PoolSettings
from trimtab.domain.replica import Hold as Hold
from trimtab.domain.vocabulary import LifeCycle, Role


class Goal(StrEnum):
    """Where a step takes its replica. A roll-back is the same step with the goal turned round."""

    AWAKE = "awake"
    ASLEEP = "asleep"
    ABSENT = "absent"


class ActionKind(StrEnum):
    """What the shell does to the world for the core."""

    CREATE = "create"
    DELETE = "delete"
    SLEEP = "sleep"
    WAKE = "wake"
    CANARY = "canary"


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The spec of a replica. It never changes; a model that is not known is filled in once its server reports it."""

    replica: str
    service: str
    role: Role
    model: str
    profile: str
    gpu_type: str = ""
    # Exactly one of both is set for what Trimtab placed; neither for a server that was given as a target.
    pool: str = ""
    group: str = ""
    decision_id: str = ""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a replica runs. `gpu_indices` ascend; empty where its GPUs have no index that is known here."""

    node: str
    gpu_indices: tuple[int, ...] = ()

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        """Its GPUs by name, as far as they are known."""
        return tuple((self.node, index) for index in self.gpu_indices)


@dataclass(frozen=True, kw_only=True)
class PlacedSpec:
    """A replica's spec, and where it runs or is to run."""

    spec: Spec
    placement: Placement

    @property
    def replica(self) -> str:
        """The replica's name."""
        return self.spec.replica

    @property
    def service(self) -> str:
        """The service that it serves."""
        return self.spec.service

    @property
    def role(self) -> Role:
        """What it does for its service."""
        return self.spec.role

    @property
    def node(self) -> str:
        """The node that it is on."""
        return self.placement.node

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """Its GPUs by name, as far as they are known."""
        return self.placement.gpus


@dataclass(frozen=True, kw_only=True)
class Told:
    """A server was requested to sleep at this level, first at this time; the outcome is not known."""

    level: int
    since_s: float


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One replica's record; the actuator is its only writer."""

    spec: Spec
    placement: Placement
    life_cycle: LifeCycle
    since_s: float
    cause: str
    address: str = ""
    holds: tuple[Hold, ...] = ()
    # It answered /health, and its last canary token came.
    ready: bool = False
    start_time_s: float = 0.0
    # Its first, slow sleep is behind it. A server that was started anew has that before it again.
    slept_once: bool = False
    # At which level it sleeps, or slept last and has not been woken by us since. 0 when it has not, or when it was
    # found asleep and neither it nor its pool has the level.
    sleep_level: int = 0
    # It may fall asleep at any time. Written before the call to its server, so that a later step on the replica knows;
    # until it is cleared, the replica is not made routable.
    told_to_sleep: Told | None = None
    # The drain deadline has passed: gateways reissue what they can continue elsewhere.
    evicting: bool = False
    # No endpoint set from this revision on shows it; gateways must have acknowledged this one before it may sleep.
    hidden_revision: int = 0
    revision: int = 0
    detail: str = ""

    @property
    def name(self) -> str:
        """Unique in the cluster."""
        return self.spec.replica

    @cached_property
    def placed(self) -> PlacedSpec:
        """Its spec and its placement."""
        return PlacedSpec(spec=self.spec, placement=self.placement)

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """Its GPUs by name, as far as they are known."""
        return self.placement.gpus

    @property
    def routable(self) -> bool:
        """Runtime-ready and free of holds: capacity."""
        return self.life_cycle is LifeCycle.ACTIVE and self.ready and not self.holds and bool(self.address)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One replica's part of an operation. ``asked`` is written before the shell acts, so a crash resumes it."""

    kind: StepKind
    goal: Goal
    replica: str
    service: str
    # For CREATE: what to create, and where.
    placed: PlacedSpec | None = None
    state: OperationState = OperationState.PENDING
    phase: str = ""
    detail: str = ""
    start_s: float = 0.0
    end_s: float = 0.0
    asked: ActionKind | None = None
    attempts: int = 0
    not_before_s: float = 0.0
    # The replicas of its role that go on serving since it was hidden, and how many requests waited there then.
    stay: tuple[str, ...] = ()
    waiting_before: int | None = None
    # Since when a gateway has been missing that knows of it; 0 while none is.
    unaware_s: float = 0.0
    # When every gateway had acknowledged that the replica is hidden; 0 until then.
    acknowledged_s: float = 0.0
    # Both are set when it begins to drain; 0 until then.
    drain_deadline_s: float = 0.0
    give_up_s: float = 0.0

    @property
    def finished(self) -> bool:
        """Nothing more will be done for it."""
        return self.state in FINISHED

    def turned(self, goal: Goal, state: OperationState, phase: str) -> Self:
        """On its way to another goal, from the beginning: without attempts, acknowledgements and deadlines."""
        return replace(
            self,
            goal=goal,
            state=state,
            phase=phase,
            attempts=0,
            not_before_s=0.0,
            acknowledged_s=0.0,
            unaware_s=0.0,
            drain_deadline_s=0.0,
            end_s=0.0,
        )


@dataclass(frozen=True, kw_only=True)
class Operation:
    """Steps that belong together. OVERLAY alone is not rolled back as one."""

    operation_id: str
    kind: OperationKind
    subject: str
    create_s: float
    update_s: float
    deadline_s: float
    state: OperationState = OperationState.PENDING
    decision_id: str = ""
    # The pool state it carries out; 0 when it puts back in order what the world changed.
    pool_revision: int = 0
    steps: tuple[Step, ...] = ()
    detail: str = ""
    cancelled: bool = False
    # Its steps are computed when these operations have ended.
    waits_for: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        """It will not change any more."""
        return self.state in FINISHED

    @property
    def atomic(self) -> bool:
        """One failed step takes the whole back."""
        return self.kind is not OperationKind.OVERLAY

    def answers_for(self, step: Step) -> bool:
        """Whether the step's replica is this operation's to put right, while it is under way.

        An atomic operation answers for all its replicas until it ends: what a finished step has done may still be
        undone. Of a pre-warming, what was never begun or was left to a newer state is free at once.
        """
        if self.kind is OperationKind.PREWARM:
            return step.state is not OperationState.CANCELLED
        return self.atomic or not step.finished


@dataclass(frozen=True, kw_only=True)
class Pool(PoolSettings):
    """A pool's last accepted desired state, and how far it has been carried out."""

    pool: str
    state_revision: int
    overlay: tuple[PlacedSpec, ...]
    awake: tuple[str, ...]
    floors: tuple[Floor, ...]
    budget_gpus: int
    decision_id: str
    # What is kept awake against the world: `awake` once its operation succeeded, what was before when it did not.
    effective_awake: tuple[str, ...] = ()
    # The newest state revision whose operation has ended, or that needed none.
    settled_revision: int = 0
    operation_id: str = ""

    @cached_property
    def gpus(self) -> frozenset[Gpu]:
        """Every GPU that the overlay names."""
        return frozenset(gpu for placed in self.overlay for gpu in placed.gpus)

    def placed(self, replica: str) -> PlacedSpec | None:
        """The overlay's entry of that name."""
        return next((placed for placed in self.overlay if placed.replica == replica), None)


@dataclass(frozen=True, kw_only=True)
class Gateway:
    """A gateway's lease and last acknowledgement. Only its name is stored; after a restart it must repeat it."""

    gateway: str
    lease_until_s: float
    acknowledged_revision: int = 0
    in_flight: Mapping[str, int] = field(default_factory=dict)
    pinned: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GroupOutcome:
    """What came of one group of a placement request."""

    group: str
    accepted: bool
    detail: str = ""
    operation_id: str = ""


@dataclass(frozen=True, kw_only=True)
class Meta:
    """Counters and memories that outlive a restart. Revisions never fall, see ``actuator.core.tick.resume``."""

    endpoint_revision: int = 0
    replica_revision: int = 0
    inventory_revision: int = 0
    operation_counter: int = 0
    # Digest of the node table of `inventory_revision`.
    inventory_digest: str = ""
    # Highest fencing token seen, by writer.
    fencing: Mapping[str, int] = field(default_factory=dict)
    # The newest placement requests by id, oldest first.
    requests: Mapping[str, tuple[GroupOutcome, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class State:
    """Everything the actuator of one cluster holds."""

    replicas: Mapping[str, Replica] = field(default_factory=dict)
    pools: Mapping[str, Pool] = field(default_factory=dict)
    operations: Mapping[str, Operation] = field(default_factory=dict)
    gateways: Mapping[str, Gateway] = field(default_factory=dict)
    meta: Meta = field(default_factory=Meta)
    # Records of the store that this release cannot read; they are in none of the above.
    refused: tuple[RefusedRecord, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Every time-out and bound in one place. Seconds unless the name has another unit."""

    starting_s: float = 600.0
    reactivating_s: float = 60.0
    sleeping_s: float = 90.0
    terminating_s: float = 60.0
    default_drain_s: float = 30.0
    # How long a deletion waits, after its drain deadline, for requests that cannot be continued elsewhere.
    pinned_wait_s: float = 60.0
    # The same for a release of a pool: another service waits for the GPUs and should get another donor.
    release_wait_s: float = 10.0
    # How long a live gateway may take to confirm that a replica is hidden; then the release is given up.
    acknowledge_s: float = 10.0
    # A release is taken back when the queue of the replicas that stay grows by so many requests each,
    guard_waiting_growth: float = 8.0
    # or the KV cache of one of them is used beyond this share.
    guard_kv_usage: float = 0.98
    rollback_s: float = 300.0
    overlay_s: float = 3600.0
    max_attempts: int = 3
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0
    gateway_lease_s: float = 3.0
    # After a restart every known gateway counts as leased for so long.
    gateway_grace_s: float = 6.0
    gateway_forget_s: float = 120.0
    misses_before_unknown: int = 3
    # An observation older than this proves nothing.
    fresh_s: float = 5.0
    # How long a step waits for a dead or silent server to come back.
    stuck_s: float = 15.0
    exited_grace_s: float = 5.0
    # A record that the backend does not list is given up after this.
    missing_grace_s: float = 3.0
    sleeper_hbm_gib: float = 2.5
    hbm_slack_gib: float = 1.0
    # Pre-warming: so long nothing has happened in the pool, and as long its replica has been cold; after the n-th
    # failure in a row 2^(n-1) times the back-off; and with the donor asleep those that stay use at most this share of
    # their KV caches.
    prewarm_after_s: float = 30.0
    prewarm_backoff_s: float = 60.0
    max_prewarm_backoff_s: float = 3600.0
    prewarm_kv_usage: float = 0.5
    keep_operations: int = 200
    keep_requests: int = 256
