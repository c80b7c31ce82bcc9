"""The kustomize manifests, rendered: valid, restricted, and with the doors that the flow needs and no others."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from actuator.shell.settings import ActuatorSettings
from gateway.shell.settings import GatewaySettings
from metrics_collector.shell.settings import CollectorSettings
from policy_engine.shell.settings import EngineSettings
from prescheduler.shell.settings import PreSchedulerSettings
from trimtab.config.settings import ServiceSettings, load_settings

KUSTOMIZATION = Path(__file__).parents[3] / "deploy" / "kubernetes"
KUBERNETES_VERSION = "1.31"

Manifest = dict[str, Any]

GRPC_SERVICES = {"metrics-collector": 7001, "policy-engine": 7002, "prescheduler": 7003, "actuator": 7004}
METRICS_PORTS = {"metrics-collector": 9001, "policy-engine": 9002, "prescheduler": 9003, "actuator": 9004}
HTTP_SERVICES = {"gateway": 8080, "fleet": 8090}
EVERY_WORKLOAD = [*GRPC_SERVICES, *HTTP_SERVICES, "valkey"]


def _render(folder: Path) -> list[Manifest]:
    if kubectl := shutil.which("kubectl"):
        command = [kubectl, "kustomize", str(folder)]
    elif kustomize := shutil.which("kustomize"):
        command = [kustomize, "build", str(folder)]
    else:
        pytest.skip("neither kubectl nor kustomize is installed")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    return _render(KUSTOMIZATION)


def _of_kind(manifests: list[Manifest], *kinds: str) -> Iterator[Manifest]:
    return (manifest for manifest in manifests if manifest["kind"] in kinds)


def _named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    found = [manifest for manifest in _of_kind(manifests, kind) if manifest["metadata"]["name"] == name]
    assert len(found) == 1, f"{kind} {name}: {len(found)} found"
    return found[0]


def _workload(manifests: list[Manifest], name: str) -> Manifest:
    found = [m for m in _of_kind(manifests, "Deployment", "StatefulSet") if m["metadata"]["name"] == name]
    assert len(found) == 1, f"{name}: {len(found)} workloads"
    return found[0]


def _pod_labels(workload: Manifest) -> dict[str, str]:
    labels: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return labels


def _container(workload: Manifest) -> Manifest:
    containers = workload["spec"]["template"]["spec"]["containers"]
    assert len(containers) == 1
    container: Manifest = containers[0]
    return container


def _container_ports(workload: Manifest) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in _container(workload)["ports"]}


def _selects(selector: Manifest, labels: dict[str, str]) -> bool:
    """A label selector of the forms in use: matchLabels, and matchExpressions with In."""
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def test_the_workloads_are_those_of_the_table(manifests: list[Manifest]) -> None:
    names = [workload["metadata"]["name"] for workload in _of_kind(manifests, "Deployment", "StatefulSet")]
    assert sorted(names) == sorted(EVERY_WORKLOAD)


def test_every_manifest_is_valid_to_the_api_server(manifests: list[Manifest]) -> None:
    assert len(manifests) > 40
    for manifest in manifests:
        validated = kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)
        assert validated, manifest["metadata"]["name"]


def test_the_base_renders_alone_and_brings_no_store(manifests: list[Manifest]) -> None:
    base = _render(KUSTOMIZATION / "base")
    assert {m["metadata"]["name"] for m in _of_kind(base, "Deployment")} == set(GRPC_SERVICES)
    assert not list(_of_kind(base, "StatefulSet", "Secret"))


def test_base_and_gateway_are_production_without_the_simulator(tmp_path: Path) -> None:
    base, gateway = (os.path.relpath(KUSTOMIZATION / part, tmp_path) for part in ("base", "components/gateway"))
    overlay = {"kind": "Kustomization", "namespace": "trimtab", "resources": [base], "components": [gateway]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    rendered = _render(tmp_path)
    workloads = {m["metadata"]["name"]: m for m in _of_kind(rendered, "Deployment", "StatefulSet")}
    assert set(workloads) == {*GRPC_SERVICES, "gateway"}
    for name, workload in workloads.items():
        assert _container(workload)["image"].partition(":")[0] == f"trimtab/{name}"
    egress = _named(rendered, "NetworkPolicy", "gateway")["spec"]["egress"]
    fleets = {"namespaceSelector": {"matchLabels": {"trimtab.dev/fleet": "true"}}}
    assert [rule["ports"] for rule in egress if fleets in rule["to"]] == [[{"protocol": "TCP", "port": 8000}]]


@pytest.mark.parametrize("name", EVERY_WORKLOAD)
def test_a_pod_keeps_to_the_restricted_profile(manifests: list[Manifest], name: str) -> None:
    pod = _workload(manifests, name)["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["enableServiceLinks"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


@pytest.mark.parametrize("name", EVERY_WORKLOAD)
def test_a_container_has_probes_and_resources(manifests: list[Manifest], name: str) -> None:
    container = _container(_workload(manifests, name))
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys()
    assert set(container["resources"]["requests"]) == {"cpu", "memory"}
    assert "memory" in container["resources"]["limits"]
    image, _, tag = container["image"].rpartition(":")
    assert image
    assert tag != "latest"


@pytest.mark.parametrize(("name", "port"), GRPC_SERVICES.items())
def test_ports_settings_probes_and_service_agree(manifests: list[Manifest], name: str, port: int) -> None:
    workload = _workload(manifests, name)
    container = _container(workload)
    mounted = workload["spec"]["template"]["spec"]["volumes"]
    config_map = next(volume["configMap"]["name"] for volume in mounted if "configMap" in volume)
    settings = yaml.safe_load(_named(manifests, "ConfigMap", config_map)["data"]["settings.yaml"])

    assert _container_ports(workload) == {"grpc": port, "metrics": METRICS_PORTS[name]}
    assert settings["listen"] == f"0.0.0.0:{port}"
    assert settings["metrics_listen"] == f"0.0.0.0:{METRICS_PORTS[name]}"
    assert container["readinessProbe"]["grpc"]["port"] == port
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    annotations = workload["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(METRICS_PORTS[name])
    service_ports = {entry["name"]: entry["port"] for entry in _named(manifests, "Service", name)["spec"]["ports"]}
    assert service_ports == {"grpc": port, "metrics": METRICS_PORTS[name]}


def test_services_select_one_workload_and_name_its_ports(manifests: list[Manifest]) -> None:
    workloads = list(_of_kind(manifests, "Deployment", "StatefulSet"))
    for service in _of_kind(manifests, "Service"):
        selector = {"matchLabels": service["spec"]["selector"]}
        selected = [workload for workload in workloads if _selects(selector, _pod_labels(workload))]
        assert len(selected) == 1, service["metadata"]["name"]
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in _container_ports(selected[0]), service["metadata"]["name"]


@pytest.mark.parametrize("name", EVERY_WORKLOAD)
def test_a_workload_has_a_disruption_budget_that_lets_a_node_drain(manifests: list[Manifest], name: str) -> None:
    workload = _workload(manifests, name)
    assert _selects(workload["spec"]["selector"], _pod_labels(workload))
    budgets = [
        budget
        for budget in _of_kind(manifests, "PodDisruptionBudget")
        if _selects(budget["spec"]["selector"], _pod_labels(workload))
    ]
    assert [budget["spec"].get("maxUnavailable") for budget in budgets] == [1]


def test_a_token_is_mounted_exactly_where_a_role_is_bound(manifests: list[Manifest]) -> None:
    bindings = list(_of_kind(manifests, "RoleBinding", "ClusterRoleBinding"))
    bound = {subject["name"] for binding in bindings for subject in binding["subjects"]}
    accounts = {m["metadata"]["name"]: m["automountServiceAccountToken"] for m in _of_kind(manifests, "ServiceAccount")}
    assert bound == {"actuator", "policy-engine", "prescheduler"}
    assert {name for name, mounted in accounts.items() if mounted} == bound
    for workload in _of_kind(manifests, "Deployment", "StatefulSet"):
        assert workload["spec"]["template"]["spec"]["serviceAccountName"] == workload["metadata"]["name"]


def test_roles_name_what_they_allow(manifests: list[Manifest]) -> None:
    roles = list(_of_kind(manifests, "Role", "ClusterRole"))
    for role in roles:
        assert "*" not in json.dumps(role["rules"]), role["metadata"]["name"]
        for rule in role["rules"]:
            assert "secrets" not in rule["resources"], role["metadata"]["name"]
    names = {(role["kind"], role["metadata"]["name"]) for role in roles}
    for binding in _of_kind(manifests, "RoleBinding", "ClusterRoleBinding"):
        assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) in names


# --- NetworkPolicies, read as a cluster's network would read them ---

OUTSIDERS: dict[str, dict[str, str]] = {
    "client": {"trimtab.dev/client": "true"},
    "stranger": {"app": "stranger"},
}


def _port_open(ports: list[Manifest], target: Manifest | None, port: int) -> bool:
    """Whether a rule's ports hold ``port`` of the ``target`` workload, by name, number or range; none is all."""
    if not ports:
        return True
    named = {} if target is None else _container_ports(target)
    for entry in ports:
        number: int = named.get(entry["port"], -1) if isinstance(entry["port"], str) else entry["port"]
        if entry.get("protocol", "TCP") == "TCP" and number <= port <= entry.get("endPort", number):
            return True
    return False


def _peer_is(peers: list[Manifest] | None, labels: dict[str, str]) -> bool:
    """Whether pods with ``labels`` in Trimtab's namespace (which has no special labels) are among a rule's peers."""
    if peers is None:
        return True
    for peer in peers:
        if "namespaceSelector" in peer and not _selects(peer["namespaceSelector"], {}):
            continue
        if _selects(peer.get("podSelector", {}), labels):
            return True
    return False


def _allows(manifests: list[Manifest], source: str, target: str, port: int) -> bool:
    """Whether TCP from pods of ``source`` to ``port`` of ``target`` passes both ends' policies."""
    to = _workload(manifests, target)
    outsider = OUTSIDERS.get(source)
    from_labels = outsider if outsider is not None else _pod_labels(_workload(manifests, source))

    def passes(direction: str, own: dict[str, str], other: dict[str, str]) -> bool:
        key, peers = ("ingress", "from") if direction == "Ingress" else ("egress", "to")
        rules = [
            rule
            for policy in _of_kind(manifests, "NetworkPolicy")
            if direction in policy["spec"]["policyTypes"] and _selects(policy["spec"]["podSelector"], own)
            for rule in policy["spec"].get(key, [])
        ]
        return any(_peer_is(rule.get(peers), other) and _port_open(rule.get("ports", []), to, port) for rule in rules)

    # An outsider's own namespace decides what it may send.
    may_send = outsider is not None or passes("Egress", from_labels, _pod_labels(to))
    return may_send and passes("Ingress", _pod_labels(to), from_labels)


@pytest.mark.parametrize(
    ("source", "target", "port"),
    [
        ("metrics-collector", "actuator", 7004),
        ("policy-engine", "actuator", 7004),
        ("prescheduler", "actuator", 7004),
        ("gateway", "actuator", 7004),
        ("gateway", "metrics-collector", 7001),
        ("gateway", "valkey", 6379),
        ("metrics-collector", "valkey", 6379),
        ("policy-engine", "valkey", 6379),
        ("prescheduler", "valkey", 6379),
        ("actuator", "valkey", 6379),
        ("actuator", "fleet", 8090),
        ("actuator", "fleet", 8100),
        ("metrics-collector", "fleet", 8999),
        ("gateway", "fleet", 8100),
        ("stranger", "gateway", 8080),
        ("client", "policy-engine", 7002),
        ("client", "prescheduler", 7003),
        ("client", "actuator", 7004),
        ("client", "metrics-collector", 7001),
    ],
)
def test_the_flow_passes(manifests: list[Manifest], source: str, target: str, port: int) -> None:
    assert _allows(manifests, source, target, port)


@pytest.mark.parametrize(
    ("source", "target", "port"),
    [
        ("stranger", "policy-engine", 7002),
        ("stranger", "actuator", 7004),
        ("stranger", "valkey", 6379),
        ("stranger", "fleet", 8100),
        ("client", "valkey", 6379),
        ("client", "policy-engine", 9002),
        ("gateway", "fleet", 8090),
        ("gateway", "policy-engine", 7002),
        ("metrics-collector", "fleet", 8090),
        ("policy-engine", "fleet", 8100),
        ("prescheduler", "policy-engine", 7002),
        ("fleet", "valkey", 6379),
        ("fleet", "actuator", 7004),
        ("actuator", "fleet", 9000),
    ],
)
def test_nothing_else_passes(manifests: list[Manifest], source: str, target: str, port: int) -> None:
    assert not _allows(manifests, source, target, port)


def test_every_pod_is_denied_by_default_in_both_directions(manifests: list[Manifest]) -> None:
    policy = _named(manifests, "NetworkPolicy", "default-deny")
    assert policy["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    selectors = [p["spec"]["podSelector"] for p in _of_kind(manifests, "NetworkPolicy") if p is not policy]
    for name in EVERY_WORKLOAD:
        assert {"matchLabels": {"app.kubernetes.io/name": name}} in selectors, f"{name} has no policy of its own"


@pytest.mark.parametrize(
    ("name", "settings_type"),
    [
        ("metrics-collector", CollectorSettings),
        ("policy-engine", EngineSettings),
        ("prescheduler", PreSchedulerSettings),
        ("actuator", ActuatorSettings),
        ("gateway", GatewaySettings),
    ],
)
def test_a_service_accepts_its_settings(
    manifests: list[Manifest], tmp_path: Path, name: str, settings_type: type[ServiceSettings]
) -> None:
    workload = _workload(manifests, name)
    container = _container(workload)
    config_map = next(
        v["configMap"]["name"] for v in workload["spec"]["template"]["spec"]["volumes"] if "configMap" in v
    )
    file = tmp_path / "settings.yaml"
    file.write_text(_named(manifests, "ConfigMap", config_map)["data"]["settings.yaml"])
    # What the API server would put there: a name of the pod, and the Secret's URL.
    environment = {entry["name"]: entry.get("value", f"redis://{name}-0/0") for entry in container["env"]}
    environment["TRIMTAB_NAME"] = f"{name}-0"

    assert container["args"] == ["--config", "/etc/trimtab/settings.yaml"]
    settings = load_settings(settings_type, ["--config", str(file)], environment)
    assert settings.insecure_listen
