"""docker-compose.yml, the Dockerfile and prometheus.yml as text: hardened, on loopback, of one mind on ports."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[3] / "deploy"
Mapping = dict[str, Any]

COMPOSE: Mapping = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())
SERVICES: dict[str, Mapping] = COMPOSE["services"]
GRPC_SERVICES = ("metrics-collector", "policy-engine", "prescheduler", "actuator")


def _dockerfile_targets() -> dict[str, str]:
    """Target → the text of its stage, for the stages that end the file (those with an ENTRYPOINT)."""
    stages = re.split(r"^FROM ", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    named = {re.match(r"\S+ AS (\S+)", stage)[1]: stage for stage in stages}  # type: ignore[index]
    return {name: stage for name, stage in named.items() if "ENTRYPOINT" in stage}


def _ports(service: str) -> set[int]:
    return {int(published.rsplit(":", 1)[1]) for published in SERVICES[service].get("ports", [])}


def test_every_target_of_the_dockerfile_is_built_by_compose() -> None:
    built = {service["build"]["target"] for service in SERVICES.values() if "build" in service}
    assert set(_dockerfile_targets()) == built


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_is_hardened(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_published_on_loopback_alone(name: str) -> None:
    for published in SERVICES[name].get("ports", []):
        assert published.startswith("127.0.0.1:"), f"{name} publishes {published}"


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_has_a_health_check_and_restarts(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    in_image = "build" in service and "HEALTHCHECK" in _dockerfile_targets()[service["build"]["target"]]
    assert in_image or "test" in service["healthcheck"]


def test_every_dependency_waits_for_health() -> None:
    waits = [
        (name, on, how["condition"])
        for name, service in SERVICES.items()
        for on, how in service.get("depends_on", {}).items()
    ]
    assert len(waits) >= 10
    for name, on, condition in waits:
        assert condition == "service_healthy", f"{name} waits for {on} to be {condition}"


@pytest.mark.parametrize("name", GRPC_SERVICES)
def test_listen_addresses_health_checks_and_published_ports_agree(name: str) -> None:
    environment = SERVICES[name]["environment"]
    stage = _dockerfile_targets()[name]
    grpc_port = int(environment["TRIMTAB_LISTEN"].rsplit(":", 1)[1])
    metrics_port = int(environment["TRIMTAB_METRICS_LISTEN"].rsplit(":", 1)[1])
    assert f'"127.0.0.1:{grpc_port}"' in stage
    assert f"EXPOSE {grpc_port} {metrics_port}" in stage
    assert _ports(name) == {grpc_port, metrics_port}


def test_only_the_services_and_the_gateway_reach_the_store() -> None:
    on_store = {name for name, service in SERVICES.items() if "store" in service["networks"]}
    assert on_store == {"redis", "gateway", *GRPC_SERVICES}
    assert SERVICES["redis"]["networks"] == ["store"]
    assert COMPOSE["networks"]["store"]["internal"] is True
    assert "ports" not in SERVICES["redis"]


def test_the_store_keeps_an_append_only_file_on_a_volume() -> None:
    command = SERVICES["redis"]["command"]
    assert command[command.index("--appendonly") + 1] == "yes"
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"
    assert SERVICES["redis"]["volumes"] == ["redis-data:/data"]


def test_prometheus_scrapes_the_metrics_port_of_every_service() -> None:
    scraped: Mapping = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    job = next(job for job in scraped["scrape_configs"] if job["job_name"] == "trimtab")
    targets = {entry["labels"]["app"]: entry["targets"] for entry in job["static_configs"]}
    for name in GRPC_SERVICES:
        listen = SERVICES[name]["environment"]["TRIMTAB_METRICS_LISTEN"]
        assert targets[name] == [f"{name}:{listen.rsplit(':', 1)[1]}"]


def test_the_dockerfile_runs_as_a_user_who_is_not_root() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    users = re.findall(r"^USER (\S+)", text, flags=re.MULTILINE)
    assert users == ["65532:65532"]
    assert text.index("USER 65532") < min(text.index(f"AS {target}\n") for target in _dockerfile_targets())


def test_the_simulator_is_in_the_image_of_the_fleet_alone() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert "mv /opt/trimtab/lib/python3*/site-packages/simulator /opt/simulated/" in text
    assert "rm -r /opt/trimtab/lib/python3*/site-packages/lab" in text
    with_simulator = {name for name, stage in _dockerfile_targets().items() if "/opt/simulated" in stage}
    assert with_simulator == {"fleet"}


def test_the_alerts_rest_on_series_that_the_services_export() -> None:
    rules: Mapping = yaml.safe_load((DEPLOY / "prometheus" / "rules" / "trimtab.yml").read_text())
    expressions = " ".join(rule["expr"] for group in rules["groups"] for rule in group["rules"])
    named = {name.removesuffix("_total") for name in re.findall(r"trimtab_[a-z_]+", expressions)}
    root = DEPLOY.parent
    sources = [
        path.read_text()
        for part in ("services", "gateway", "lab", "simulator", "trimtab")
        for path in (root / part).rglob("*.py")
    ]
    exported = {name for text in sources for name in re.findall(r'"(trimtab_[a-z_]+)"', text)}
    assert len(named) >= 6
    assert named <= exported


def _with_own_targets(**variables: str) -> subprocess.CompletedProcess[str]:
    """What Compose makes of the two files; it needs no engine for that."""
    beside = Path(sys.executable).parent / "docker-compose"
    compose = str(beside) if beside.exists() else shutil.which("docker-compose")
    if compose is None:
        pytest.skip("no docker-compose")
    files = [str(DEPLOY / name) for name in ("docker-compose.yml", "docker-compose.targets.yml")]
    command = [compose, "-f", files[0], "-f", files[1], "config", "--format", "json"]
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_ones_own_servers_take_the_place_of_the_simulated_fleet(tmp_path: Path) -> None:
    done = _with_own_targets(TARGETS=str(tmp_path / "targets.yaml"), POLICIES=str(tmp_path))
    assert done.returncode == 0, done.stderr
    services = json.loads(done.stdout)["services"]
    assert set(services) == set(SERVICES) - {"fleet"}
    actuator = services["actuator"]
    assert set(actuator["depends_on"]) == {"redis"}
    assert actuator["environment"]["TRIMTAB_BACKEND"] == "static"
    assert actuator["environment"]["TRIMTAB_STORE_URL"] == "redis://redis:6379/0"
    mounted = {volume["target"]: volume["source"] for volume in actuator["volumes"]}
    assert mounted == {"/etc/trimtab/targets.yaml": str(tmp_path / "targets.yaml")}
    assert services["policy-engine"]["environment"]["TRIMTAB_BOOTSTRAP_DIR"] == "/etc/trimtab/resources"


def test_ones_own_servers_have_to_be_named() -> None:
    done = _with_own_targets(POLICIES="/nowhere")
    assert done.returncode != 0
    assert "TARGETS" in done.stderr
    assert "a file_sd document of your servers" in done.stderr
