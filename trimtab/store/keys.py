"""Every key that Trimtab keeps in the store. No other module builds keys.

    trimtab:schema                          version of the layout below
    trimtab:{owner}:…                       what one writer keeps

The part in braces is a Redis Cluster hash tag: keys of one owner share a slot, so that a script or transaction may
write them together with the owner's lease. The owners:

    policy-engine           policies, pools, decisions, desired state; its leader's lease
    prescheduler            cycles, results, groups; its leader's lease
    actuator/<cluster>      replicas, holds, operations, endpoints of one cluster; acknowledgements of gateways
    obs/<service>/<role>    windows and latest samples of one role (several collectors write)
    collector               which roles are observed, demand at the front door, which collectors share the targets

Values are protobuf messages in their binary form unless a function says otherwise. A change of keys or of what they
mean raises ``SCHEMA_VERSION``: a process upgrades a store of an older one (``trimtab.store.upgrades``) and refuses a
newer one rather than misread it.
"""

import hashlib
import re

PREFIX = "trimtab:"
SCHEMA_VERSION = 2
SCHEMA = "trimtab:schema"
"""String: the decimal ``SCHEMA_VERSION`` of the newest release that has used this store."""

POLICY_ENGINE = "policy-engine"
PRESCHEDULER = "prescheduler"
COLLECTOR = "collector"

_PART = re.compile(r"[A-Za-z0-9_.:/@-]{1,253}")


def actuator(cluster: str) -> str:
    """Owner name of a cluster's actuator."""
    return f"actuator/{cluster}"


def role(service: str, role_name: str) -> str:
    """Owner name of what is observed of one role; ``role_name`` as in ``ROLE_DECODE``."""
    return f"obs/{service}/{role_name}"


def owned(owner: str, *parts: str) -> str:
    """The general form, ``trimtab:{owner}:part:part``. Raises ``ValueError`` for a part that could forge a key."""
    for part in (owner, *parts):
        if _PART.fullmatch(part) is None:
            raise ValueError(f"{part[:80]!r} cannot be part of a store key")
    return PREFIX + "{" + owner + "}:" + ":".join(parts)


# Leases (trimtab.store.lease)


def lease(name: str) -> str:
    """Hash with owner and token of the holder; expires with the lease. ``name`` is an owner name."""
    return owned(name, "lease")


def lease_token(name: str) -> str:
    """Counter of fencing tokens handed out; never expires, never falls."""
    return owned(name, "lease-token")


# Versioned documents (trimtab.store.documents)


def documents(owner: str, kind: str) -> str:
    """Hash: name → newest version of a document."""
    return owned(owner, "docs", kind)


def documents_revision(owner: str, kind: str) -> str:
    """Counter of changes to any document of the kind."""
    return owned(owner, "docs-revision", kind)


def document_history(owner: str, kind: str, name: str) -> str:
    """List: the last versions of one document, newest first."""
    return owned(owner, "docs-history", kind, name)


# Metrics collector


def observed_roles() -> str:
    """Hash: ``service/ROLE_NAME`` → unix seconds (decimal) of the last window written."""
    return owned(COLLECTOR, "roles")


def demand() -> str:
    """Hash: collector → CollectorDemand, the gateways' last reports to it."""
    return owned(COLLECTOR, "demand")


def collector_members() -> str:
    """Hash: collector → its lease, as text (``metrics_collector.core.sharing``)."""
    return owned(COLLECTOR, "members")


def windows_written() -> str:
    """Channel, no key: a collector publishes the end, in seconds, of each round of windows (``store.news``)."""
    return owned(COLLECTOR, "written")


def sample_schemas() -> str:
    """Hash: fingerprint (16 hexadecimal digits) → SampleSchema of the samples' levels."""
    return owned(COLLECTOR, "schemas")


def latest_partials(service: str, role_name: str) -> str:
    """Hash: collector → its newest RolePartial; ``collector/previous`` → the one before."""
    return owned(role(service, role_name), "partials")


def partial_history(service: str, role_name: str) -> str:
    """Stream of RolePartials of all collectors, bounded."""
    return owned(role(service, role_name), "history")


def latest_samples(service: str, role_name: str) -> str:
    """Hash: replica → its newest ReplicaSample."""
    return owned(role(service, role_name), "samples")


# Policy engine


def decisions() -> str:
    """Stream of Decisions, new ones and new outcomes: news of bounded length, whose records are in the hash."""
    return owned(POLICY_ENGINE, "decisions")


def decision_index() -> str:
    """Hash: decision id → Decision with its outcome, of all subjects; its writer bounds it, by subject."""
    return owned(POLICY_ENGINE, "decision-index")


def decision_inputs() -> str:
    """Hash: decision id → ReplayRecord, the input that it was made from; bounded as the index is."""
    return owned(POLICY_ENGINE, "decision-inputs")


def scaling_requests() -> str:
    """Hash: service → its ScalingRequest, absolute."""
    return owned(POLICY_ENGINE, "scaling-requests")


def desired_pools() -> str:
    """Hash: pool → DesiredPoolRecord, absolute."""
    return owned(POLICY_ENGINE, "desired-pools")


def engine_state(part: str) -> str:
    """Hash: name → what the engine's next tick, or its next leader, goes on from: ``pools`` has PoolStateRecords,
    ``scaled`` ScaledStateRecords."""
    return owned(POLICY_ENGINE, "state", part)


def paused() -> str:
    """Hash: service or pool → its pause: author, time and reason."""
    return owned(POLICY_ENGINE, "paused")


# Pre-scheduler


def cycles() -> str:
    """Stream of CycleRecords, bounded."""
    return owned(PRESCHEDULER, "cycles")


def schedule_results() -> str:
    """Hash: service → ScheduleResultRecord, what came of its last scaling request."""
    return owned(PRESCHEDULER, "results")


def deployment_groups() -> str:
    """Hash: ``cluster/service/group`` → DeploymentGroupRecord, as it was when its cluster was last seen."""
    return owned(PRESCHEDULER, "groups")


def schedule_answer(request_id: str) -> str:
    """Hash: digest of a Schedule call, and the ScheduleAnswerRecord of it; expires. Any ``request_id`` will do."""
    return owned(PRESCHEDULER, "answers", hashlib.blake2b(request_id.encode(), digest_size=16).hexdigest())


# Actuator of one cluster


def replicas(cluster: str) -> str:
    """Hash: replica → ReplicaRecord, with holds and life cycle; the actuator alone reads it."""
    return owned(actuator(cluster), "replicas")


def operations(cluster: str) -> str:
    """Hash: operation id → OperationRecord, with every step; the actuator alone reads it."""
    return owned(actuator(cluster), "operations")


def pool_states(cluster: str) -> str:
    """Hash: pool → PoolRecord, the state accepted last and how far it is carried out; the actuator alone reads it."""
    return owned(actuator(cluster), "pools")


def placements(cluster: str) -> str:
    """Hash: group or replica → the placement accepted for it."""
    return owned(actuator(cluster), "placements")


def fencing_tokens(cluster: str) -> str:
    """Hash: writer → highest token seen (decimal)."""
    return owned(actuator(cluster), "fencing")


def endpoints(cluster: str) -> str:
    """Hash: service → ServiceEndpoints; ``@head`` → RegistryHead (``store.registry``)."""
    return owned(actuator(cluster), "endpoints")


def endpoints_written(cluster: str) -> str:
    """Channel, no key: the actuator publishes the revision of every set that it has written (``store.news``)."""
    return owned(actuator(cluster), "endpoints-written")


def gateways(cluster: str) -> str:
    """Hash: gateway → 1, those that the actuator knows."""
    return owned(actuator(cluster), "gateways")


def gateway_words(cluster: str) -> str:
    """Hash: gateway → its last AcknowledgeEndpointsRequest. The gateways write it, each its own field."""
    return owned(actuator(cluster), "gateway-words")


def gateways_spoke(cluster: str) -> str:
    """Channel, no key: a gateway that confirms a set or freed a hidden replica publishes its name (``store.news``)."""
    return owned(actuator(cluster), "gateways-spoke")


def revisions(cluster: str) -> str:
    """Hash: ``meta`` → ActuatorMetaRecord; ``token`` → the fencing token of the last writer (decimal)."""
    return owned(actuator(cluster), "revisions")
