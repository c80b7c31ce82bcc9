"""GetStatus: every service, pool and cluster as of the last cycle."""

from __future__ import annotations

from policy_engine.core.decision import role_value
from policy_engine.core.pool.reports import MemberReport
from policy_engine.core.shared.vocabulary import MemberKey
from policy_engine.shell.engine import Engine
from policy_engine.shell.pools import PoolReport
from trimtab.api.common.v1 import types_pb2
from trimtab.api.policy.v1 import policy_pb2
from trimtab.config.resources import ServicePolicy
from trimtab.config.specs import PolicyKind
from trimtab.domain.measurement import measurement_to_proto
from trimtab.domain.pool import Gpu, OverlayReplica
from trimtab.domain.role_signals import FrontDoor, RoleSignals
from trimtab.domain.time import timestamp_of
from trimtab.domain.vocabulary import Role
from trimtab.store import keys


def status(engine: Engine) -> policy_pb2.GetStatusResponse:
    """The answer to GetStatus. Desired counts and Z are of the last cycle, replicas of now."""
    response = policy_pb2.GetStatusResponse(leader=engine.lease.held)
    response.as_of.CopyFrom(timestamp_of(engine.last_cycle_s))
    response.fencing.CopyFrom(types_pb2.Fencing(writer=keys.POLICY_ENGINE, token=engine.known_token))
    members = {
        (report.pool.name, member.key): member
        for report in engine.pools.reports.values()
        if report.result is not None
        for member in report.result.reports
    }
    snapshot = engine.catalog.snapshot
    for name in sorted(snapshot.policies):
        home = snapshot.pool_of(name)
        if home is None:
            response.services.append(_scaled(engine, snapshot.policies[name]))
        else:
            pool_report = engine.pools.reports.get(home.name)
            keyed = {key: member for (pool, key), member in members.items() if pool == home.name}
            response.services.append(_pooled(engine, snapshot.policies[name], pool_report, keyed))
    for name in sorted(engine.pools.reports):
        response.pools.append(_pool(engine, engine.pools.reports[name]))
    for cluster, link in engine.fleet.links.items():
        response.clusters.add(
            cluster=cluster, reachable=link.reachable, replica_revision=link.revision, detail=link.detail
        )
    return response


def _roles(
    engine: Engine, policy: ServicePolicy, desired: dict[Role, int], *, pooled: bool | None
) -> list[policy_pb2.RoleStatus]:
    """Replicas in pools, outside them, or (None) wherever they are."""
    found: list[policy_pb2.RoleStatus] = []
    for spec in policy.spec.roles:
        role = policy_pb2.RoleStatus(role=role_value(spec.role), desired=desired.get(spec.role, 0))
        for link in engine.fleet.links.values():
            for replica in link.replicas.values():
                if (replica.service, replica.role) != (policy.name, spec.role):
                    continue
                if pooled is not None and bool(replica.pool) is not pooled:
                    continue
                role.routable += replica.routable
                role.replicas[replica.life_cycle.proto_name] += 1
        view = engine.last_observed.roles.get(MemberKey(policy.name, spec.role), RoleSignals(role=spec.role))
        role.decode_tps.CopyFrom(measurement_to_proto(view.decode_tps))
        role.prefill_tps.CopyFrom(measurement_to_proto(view.prefill_tps))
        role.running.CopyFrom(measurement_to_proto(view.running))
        role.waiting.CopyFrom(measurement_to_proto(view.waiting))
        role.ttft_p95_s.CopyFrom(measurement_to_proto(view.ttft_p95_s))
        role.tpot_p95_s.CopyFrom(measurement_to_proto(view.tpot_p95_s))
        found.append(role)
    return found


def _base(engine: Engine, policy: ServicePolicy) -> policy_pb2.ServiceStatus:
    service = policy_pb2.ServiceStatus(service=policy.name, paused=policy.metadata.paused)
    front = engine.last_observed.fronts.get(policy.name, FrontDoor())
    service.held.CopyFrom(measurement_to_proto(front.held))
    last = engine.log.newest(subject=policy.name, count=1)
    service.last_decision_id = last[0].decision_id if last else ""
    return service


def _scaled(engine: Engine, policy: ServicePolicy) -> policy_pb2.ServiceStatus:
    service = _base(engine, policy)
    report = engine.scaled.reports.get(policy.name)
    scaled = policy.spec.kind == PolicyKind.SCALED
    if scaled:
        service.mode = policy_pb2.SERVICE_MODE_SCALED
        service.holding = report.result.holding if report is not None else "not looked at yet"
    else:
        service.holding = "in no pool yet"
    desired = dict(report.result.state.desired or ()) if report is not None else {}
    # A service that is neither scaled nor in a pool keeps the replicas of the pool that it was in.
    service.roles.extend(_roles(engine, policy, desired, pooled=False if scaled else None))
    return service


def _pooled(
    engine: Engine,
    policy: ServicePolicy,
    report: PoolReport | None,
    members: dict[MemberKey, MemberReport],
) -> policy_pb2.ServiceStatus:
    service = _base(engine, policy)
    service.mode = policy_pb2.SERVICE_MODE_POOLED
    service.holding = report.holding if report is not None else "not looked at yet"
    own = {key.role: member for key, member in sorted(members.items()) if key.service == policy.name}
    known = [(member.share.z, member) for member in own.values() if member.share.z is not None]
    if known:
        # A disaggregated service is as well off as its worse stage.
        service.z, worst = min(known, key=lambda item: (item[0], item[1].key))
        service.region = policy_pb2.Region.Value(f"REGION_{worst.share.region.value}")
    loads = [member.load.rho for member in own.values() if member.load is not None and member.load.rho is not None]
    if loads:
        service.rho = max(loads)
    desired = {role: member.awake for role, member in own.items()}
    service.roles.extend(_roles(engine, policy, desired, pooled=True))
    return service


def _pool(engine: Engine, report: PoolReport) -> policy_pb2.PoolStatus:
    pool = report.pool
    found = policy_pb2.PoolStatus(
        pool=pool.name,
        cluster=pool.spec.cluster,
        budget_gpus=pool.spec.budget_gpus,
        operation_id=report.operation_id,
        holding=report.holding,
        paused=pool.metadata.paused,
    )
    occupant: dict[Gpu, OverlayReplica] = {}
    if report.desired is not None:
        found.state_revision = report.desired.state_revision
        awake = set(report.desired.awake)
        for item in report.desired.overlay:
            if item.replica in awake:
                occupant.update(dict.fromkeys(item.gpus, item))
    found.awake_gpus = len(occupant)
    for entry in sorted(pool.spec.gpus, key=lambda gpus: gpus.node):
        for index in sorted(entry.gpu_indices):
            holder = occupant.get((entry.node, index))
            found.gpus.add(
                node=entry.node,
                index=index,
                replica=holder.replica if holder is not None else "",
                service=holder.member.service if holder is not None else "",
            )
    return found
