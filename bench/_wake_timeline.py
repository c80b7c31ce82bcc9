"""The events between one step in demand and its wake call, from the records of the services.

Windows come from the collector's history in the store, whose entries carry the time at which they were written;
decisions and the window that each rests on from the engine's records; steps from the actuator's operation. Beside it
is how long each process waited for a CPU meanwhile (Linux): what the machine added, and no timer of Trimtab's.
All times are seconds since the step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from policy_engine.core.pool.decide import PoolInput
from policy_engine.shell.replay import ReplayError, decode_input
from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.collector.v1 import collector_pb2
from trimtab.api.policy.v1 import decision_pb2
from trimtab.domain.time import seconds_of
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.observations import merge, signal, window_end_s
from trimtab.store.streams import BoundedStream

BEFORE_S = 3.0
"""So much from before the step is shown: what the last step left behind."""
_HISTORY = 1_000_000
_ROLE = "ROLE_COLOCATED"


@dataclass(frozen=True, kw_only=True)
class WindowSeen:
    """One window of the service that steps; None where a signal has no value."""

    ended_s: float
    written_s: float
    running: float | None
    waiting: float | None
    decode_tps: float | None

    @property
    def shows_demand(self) -> bool:
        """Whether a share could be computed from it: a request on average, or one that waits."""
        return (self.running or 0.0) >= 1.0 or (self.waiting or 0.0) > 0.0


@dataclass(frozen=True, kw_only=True)
class Decided:
    """One decision on the pool, and the end of the service's window that it rests on."""

    at_s: float
    window_s: float | None
    rule: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One step of the operation."""

    kind: str
    replica: str
    began_s: float
    ended_s: float | None


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step in demand, whole."""

    cell: str
    decided_s: float
    accepted_s: float
    called_s: float
    windows: list[WindowSeen] = field(default_factory=list)
    decisions: list[Decided] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    cpu_wait_s: dict[str, float] = field(default_factory=dict)

    @property
    def released_s(self) -> float | None:
        """When the last release had ended."""
        ends = [one.ended_s for one in self.stages if one.kind == "release" and one.ended_s is not None]
        return max(ends) if ends else None

    @property
    def routable_s(self) -> float | None:
        """When the woken server was shown."""
        ends = [one.ended_s for one in self.stages if one.kind == "wake" and one.ended_s is not None]
        return max(ends) if ends else None

    @property
    def first_window(self) -> WindowSeen | None:
        """The first that ended after the step and shows demand."""
        return next((one for one in self.windows if one.ended_s > 0.0 and one.shows_demand), None)

    def parts(self) -> dict[str, float]:
        """Where the time went: the parts add up to the wake call.

        `to_window`: until the first window ends that shows the step. `to_written`: until the collector has written it.
        `to_decision`: until the engine decided, on that window or a later one. `to_operation`: until the actuator took
        it. `to_call`: until `/wake_up`, the release of a donor included.
        """
        seen = self.first_window
        window_s = min(seen.ended_s, self.decided_s) if seen is not None else 0.0
        written_s = min(seen.written_s, self.decided_s) if seen is not None else window_s
        return {
            "to_window": window_s,
            "to_written": written_s - window_s,
            "to_decision": self.decided_s - written_s,
            "to_operation": self.accepted_s - self.decided_s,
            "to_call": self.called_s - self.accepted_s,
        }

    def document(self) -> dict[str, object]:
        """As JSON."""
        return asdict(self) | {"parts": {name: round(value, 3) for name, value in self.parts().items()}}

    def lines(self) -> list[str]:
        """For people, in the order of time."""
        parts = ", ".join(f"{name} {value:.2f}" for name, value in self.parts().items())
        events = [(one.written_s, f"window to {one.ended_s:+.3f} written: {_figures(one)}") for one in self.windows]
        for one in self.decisions:
            rests = "" if one.window_s is None else f" on the window to {one.window_s:+.3f}"
            events.append((one.at_s, f"decided{rests}, {one.rule}: {one.reason}"))
        events += [(0.0, "step"), (self.accepted_s, "the actuator took it"), (self.called_s, "/wake_up")]
        for stage in self.stages:
            events.append((stage.began_s, f"{stage.kind} of {stage.replica} begins"))
            if stage.ended_s is not None:
                events.append((stage.ended_s, f"{stage.kind} of {stage.replica} has ended"))
        waits = ", ".join(f"{name} {value:.2f}" for name, value in sorted(self.cpu_wait_s.items()))
        return [
            f"{self.cell}: {self.called_s:.3f} s ({parts}); waited for a CPU: {waits}",
            *(f"  {at_s:+8.3f}  {text}" for at_s, text in sorted(events)),
        ]


def _figures(window: WindowSeen) -> str:
    pairs = (("running", window.running), ("waiting", window.waiting), ("decode tok/s", window.decode_tps))
    return ", ".join(f"{name} {'none' if value is None else f'{value:.2f}'}" for name, value in pairs)


async def windows_of(store: Store, service: str, *, since_s: float, until_s: float) -> list[WindowSeen]:
    """The service's windows written from BEFORE_S before the step until `until_s` (Unix), by the time of writing."""
    history: BoundedStream[collector_pb2.RolePartial] = BoundedStream(
        store, keys.partial_history(service, _ROLE), collector_pb2.RolePartial, maxlen=_HISTORY
    )
    found = []
    for entry in await history.read_between(since_s - BEFORE_S, until_s):
        merged = merge([entry.message])
        found.append(
            WindowSeen(
                ended_s=round(window_end_s(merged) - since_s, 3),
                written_s=round(entry.time_s - since_s, 3),
                running=_value(merged, collector_pb2.SIGNAL_RUNNING),
                waiting=_value(merged, collector_pb2.SIGNAL_WAITING),
                decode_tps=_value(merged, collector_pb2.SIGNAL_DECODE_TPS),
            )
        )
    return found


def _value(merged: collector_pb2.RoleObservation, name: collector_pb2.Signal.ValueType) -> float | None:
    measured = signal(merged, name)
    return measured.value if measured.HasField("value") else None


def decisions_of(
    records: Sequence[decision_pb2.Decision], pool: str, service: str, *, since_s: float, until_s: float
) -> list[Decided]:
    """The pool's decisions of that time, oldest first."""
    found = []
    for record in records:
        at_s = seconds_of(record.decide_time)
        if concerns(record, pool, since_s=since_s, until_s=until_s):
            found.append(
                Decided(
                    at_s=round(at_s - since_s, 3),
                    window_s=_window_s(record, service, since_s),
                    rule=decision_pb2.Rule.Name(record.rule).removeprefix("RULE_").lower(),
                    reason=record.reason,
                )
            )
    return sorted(found, key=lambda one: one.at_s)


def concerns(record: decision_pb2.Decision, pool: str, *, since_s: float, until_s: float) -> bool:
    """Whether it is a decision of the pool of that time, or of shortly before."""
    return record.subject == pool and since_s - BEFORE_S <= seconds_of(record.decide_time) <= until_s


def _window_s(record: decision_pb2.Decision, service: str, since_s: float) -> float | None:
    try:
        given = decode_input(record)
    except ReplayError:
        return None
    if not isinstance(given, PoolInput):
        return None
    ends = [view.window_end_s for key, view in given.views if key.service == service and view.window_end_s is not None]
    return round(ends[0] - since_s, 3) if ends else None


def stages_of(operation: actuator_pb2.Operation, *, since_s: float) -> list[Stage]:
    """The operation's steps."""
    return [
        Stage(
            kind=actuator_pb2.StepKind.Name(step.kind).removeprefix("STEP_KIND_").lower(),
            replica=step.replica,
            began_s=round(seconds_of(step.start_time) - since_s, 3),
            ended_s=round(seconds_of(step.end_time) - since_s, 3) if step.HasField("end_time") else None,
        )
        for step in operation.steps
        if step.HasField("start_time")
    ]


def cpu_waits_s(pids: Mapping[str, int]) -> dict[str, float]:
    """How long the main thread of each process has been ready to run and without a CPU, in seconds so far; without
    processes that are gone, and empty where the kernel does not count it."""
    found = {}
    for name, pid in pids.items():
        try:
            counted = Path(f"/proc/{pid}/schedstat").read_text().split()
        except OSError:
            continue
        if len(counted) >= 2:
            found[name] = int(counted[1]) / 1e9
    return found
