"""For the docker tests: a compose project of their own, with another name, free ports, and images built through an
override file, so that it runs beside a stack that is up already. They skip, with a reason, where there is no engine.
"""

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
COMPOSE_FILE = REPOSITORY / "deploy" / "docker-compose.yml"
BUILD_TIMEOUT_S = 900.0
COMMAND_TIMEOUT_S = 240.0


class NoEngine(Exception):
    """The tests cannot run here; the message is the reason to skip with."""


def _cache_folder() -> Path:
    base = os.environ.get("TRIMTAB_CI_CACHE")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trimtab-ci"


def docker_environment() -> dict[str, str]:
    """The environment with a DOCKER_HOST that answers. Raises ``NoEngine``."""
    if shutil.which("docker") is None:
        raise NoEngine("no docker client")
    candidates = [os.environ.get("DOCKER_HOST", "")]
    host_file = _cache_folder() / "docker_host"
    if host_file.is_file():
        candidates.append(host_file.read_text().strip())
    candidates.append("unix:///var/run/docker.sock")
    for host in filter(None, candidates):
        environment = {**os.environ, "DOCKER_HOST": host}
        command = ["docker", "version", "--format", "{{.Server.Version}}"]
        answer = subprocess.run(command, env=environment, capture_output=True, timeout=20, check=False)
        if answer.returncode == 0:
            return environment
    raise NoEngine("no Docker engine answers: run .ci/docker-engine")


def require_images(environment: dict[str, str], images: list[str]) -> None:
    """Raises ``NoEngine`` for an image that the engine does not have."""
    for image in images:
        found = subprocess.run(
            ["docker", "image", "inspect", image], env=environment, capture_output=True, timeout=20, check=False
        )
        if found.returncode != 0:
            raise NoEngine(f"the engine has no image {image}: run .ci/docker-engine")


def compose_command() -> list[str]:
    """``docker compose``, or the docker-compose of this virtual environment. Raises ``NoEngine``."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=20, check=False)
    if plugin.returncode == 0:
        return ["docker", "compose"]
    beside = Path(sys.executable).parent / "docker-compose"
    standalone = str(beside) if beside.exists() else shutil.which("docker-compose")
    if standalone is None:
        raise NoEngine("neither `docker compose` nor docker-compose")
    return [standalone]


def _pip_build_args() -> dict[str, str]:
    """What a build needs to reach the package index that this machine's pip uses: its URLs, and proxies."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, timeout=60, check=False
    )
    args = {}
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        name = {"index-url": "PIP_INDEX_URL", "extra-index-url": "PIP_EXTRA_INDEX_URL"}.get(key.rpartition(".")[2])
        # A folder of this machine is none in a container.
        urls = [url for url in value.strip("'").split() if not url.startswith("file:")]
        if name is not None and urls:
            args[name] = " ".join(urls)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"):
        if name in os.environ:
            args[name] = os.environ[name]
    return args


class _Override(list[str]):
    """A list that replaces the one of the file it is laid over, where Compose would join them."""


class _OverrideDumper(yaml.SafeDumper):
    pass


_OverrideDumper.add_representer(
    _Override, lambda dumper, data: dumper.represent_sequence("!override", list(data), flow_style=True)
)


def _override_document(compose: dict[str, Any]) -> str:
    """Builds on the host's network with the host's pip settings, own image names, and ports that the system chooses."""
    services: dict[str, Any] = {}
    for name, service in compose["services"].items():
        changes: dict[str, Any] = {}
        if "ports" in service:
            changes["ports"] = _Override(f"127.0.0.1::{entry.rsplit(':', 1)[1]}" for entry in service["ports"])
        if "build" in service:
            changes["image"] = f"trimtab-compose-test/{service['build']['target']}"
            changes["build"] = {"network": "host", "args": _pip_build_args()}
        services[name] = changes
    return yaml.dump({"services": services}, Dumper=_OverrideDumper, sort_keys=False)


class ComposeStack:
    """One project: ``build``, ``up``, look at it, ``down``. Commands that fail raise with what they printed."""

    repository = REPOSITORY

    def __init__(self, folder: Path) -> None:
        compose: dict[str, Any] = yaml.safe_load(COMPOSE_FILE.read_text())
        self.environment = docker_environment()
        self._compose = compose_command()
        # `${REDIS_IMAGE:-redis:8.0}` → its default.
        pulled = {
            name: service["image"].partition(":-")[2].rstrip("}")
            for name, service in compose["services"].items()
            if "build" not in service
        }
        require_images(self.environment, ["debian:trixie-slim", *pulled.values()])
        self.prometheus_image = pulled["prometheus"]
        self.project = f"trimtab-test-{uuid.uuid4().hex[:8]}"
        self._override = folder / "override.yml"
        self._override.write_text(_override_document(compose))

    def compose(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Runs one compose command on this project; its standard output."""
        files = ["-f", str(COMPOSE_FILE), "-f", str(self._override)]
        return self._run([*self._compose, "-p", self.project, *files, *arguments], timeout_s)

    def docker(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Runs one docker command; its standard output."""
        return self._run(["docker", *arguments], timeout_s)

    def _run(self, command: list[str], timeout_s: float) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if done.returncode != 0:
            shown = " ".join(command[-4:])
            raise AssertionError(f"{shown} exited {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
        return done.stdout

    def build(self) -> None:
        """Builds every image: one first, so that the others find the layers they share made."""
        self.compose("build", "fleet", timeout_s=BUILD_TIMEOUT_S)
        self.compose("build", timeout_s=BUILD_TIMEOUT_S)

    def up(self) -> None:
        """Starts everything and waits for health; what the containers said is in the error where it fails."""
        try:
            self.compose("up", "--no-build", "--wait", "--wait-timeout", "240", timeout_s=300.0)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.compose('logs', '--tail', '15', '--no-color')}") from None

    def down(self) -> None:
        """Ends the project with its volumes and networks."""
        self.compose("down", "-v", "--remove-orphans", "--timeout", "5")

    def containers(self) -> dict[str, dict[str, Any]]:
        """``docker inspect`` of every container, by compose service."""
        names = self.compose("ps", "--all", "--quiet").split()
        inspected: list[dict[str, Any]] = json.loads(self.docker("inspect", *names))
        return {item["Config"]["Labels"]["com.docker.compose.service"]: item for item in inspected}

    def address(self, service: str, port: int) -> str:
        """host:port on this machine of a published port."""
        return self.compose("port", service, str(port)).strip()


@pytest.fixture(scope="session")
def compose_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposeStack]:
    """The project with its images built and everything up and healthy; gone after the last test."""
    try:
        stack = ComposeStack(tmp_path_factory.mktemp("compose"))
    except NoEngine as reason:
        pytest.skip(str(reason))
    stack.build()
    try:
        stack.up()
        yield stack
    finally:
        stack.down()


@pytest.fixture(scope="session")
def promtool(tmp_path_factory: pytest.TempPathFactory) -> ComposeStack:
    """The project, not started: for `docker run` of Prometheus' own tools."""
    try:
        return ComposeStack(tmp_path_factory.mktemp("promtool"))
    except NoEngine as reason:
        pytest.skip(str(reason))
