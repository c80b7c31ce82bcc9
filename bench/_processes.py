"""The processes that ``bench.scrape`` measures: the collector, Prometheus, and the child that serves pages."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench._pages import address_of

REPLICAS_PER_SERVICE = 50
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Measured:
    """A process that runs. ``metrics_url`` is its own page."""

    process: "subprocess.Popen[bytes]"
    metrics_url: str

    def cpu_s(self) -> float:
        """User and system seconds since its start."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def metrics(self) -> str:
        """Its own page."""
        with urllib.request.urlopen(self.metrics_url, timeout=10) as answer:
            return str(answer.read().decode())


def free_port() -> int:
    """A free port, below those that the system gives to clients. Raises RuntimeError when none is free."""
    for port in range(21_000 + os.getpid() % 5_000, 30_000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            if port not in _GIVEN:
                _GIVEN.add(port)
                return port
    raise RuntimeError("no free port between 21000 and 30000")


_GIVEN: set[int] = set()


def await_port(port: int) -> None:
    """Wait until a server listens. Raises ``TimeoutError``."""
    give_up = time.monotonic() + 30
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if time.monotonic() > give_up:
            raise TimeoutError(f"nobody listens on port {port}")
        time.sleep(0.05)


@contextmanager
def running(command: Sequence[str], folder: Path, name: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A process whose output goes to a file, ended at the end."""
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(list(command), stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Fleet:
    """Servers under many addresses, all with one page."""

    port: int

    def served(self) -> Mapping[str, int]:
        """Answers so far, by client."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/served", timeout=10) as answer:
            found: dict[str, int] = json.loads(answer.read())
        return found


@contextmanager
def fleet(folder: Path, full: bytes, filtered: bytes, *, hang_every: int = 0) -> Iterator[Fleet]:
    """The child that serves pages."""
    port = free_port()
    (folder / "full.prom").write_bytes(full)
    (folder / "filtered.prom").write_bytes(filtered)
    command = [sys.executable, "-m", "bench._pages", str(port), str(folder / "full.prom")]
    command += [str(folder / "filtered.prom"), "--hang-every", str(hang_every)]
    with running(command, folder, "pages"):
        await_port(port)
        yield Fleet(port)


@contextmanager
def collector(
    folder: Path, store_url: str, port: int, *, targets: int, interval_s: float, filtered: bool
) -> Iterator[Measured]:
    """The whole collector, as in production."""
    path = folder / "targets.json"
    groups = [
        {
            "targets": [f"{address_of(index)}:{port}"],
            "labels": {"service": f"s-{index // REPLICAS_PER_SERVICE}", "role": "colocated", "replica": f"r-{index}"},
        }
        for index in range(targets)
    ]
    path.write_text(json.dumps(groups))
    listen, metrics = free_port(), free_port()
    command = [sys.executable, "-m", "metrics_collector", "--listen", f"127.0.0.1:{listen}"]
    command += ["--metrics-listen", f"127.0.0.1:{metrics}", "--store-url", store_url, "--targets-files", str(path)]
    command += ["--scrape-interval-s", f"{interval_s:g}", "--window-s", f"{max(5.0, 2 * interval_s):g}"]
    command += ["--scrape-timeout-s", f"{min(0.8, 0.8 * interval_s):g}"]
    command += ["--filter-pages", str(filtered).lower(), "--log-level", "warning", "--drain-grace-s", "0"]
    with running(command, folder, "collector") as process:
        await_port(metrics)
        yield Measured(process, f"http://127.0.0.1:{metrics}/metrics")


def prometheus_version() -> str | None:
    """What is installed; None for none."""
    binary = shutil.which("prometheus")
    if binary is None:
        return None
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"version (\S+)", said.stdout + said.stderr)
    return found.group(1) if found else "unknown"


@contextmanager
def prometheus(
    folder: Path, port: int, *, targets: int, interval_s: float, names: Sequence[str] | None
) -> Iterator[Measured]:
    """Prometheus on the same targets; ``names`` for the filtered page."""
    data = folder / f"prometheus-{'full' if names is None else 'filtered'}"
    listen = free_port()
    path = "/metrics" if names is None else "/metrics/"
    config = {
        "global": {"scrape_interval": f"{interval_s * 1000:.0f}ms", "scrape_timeout": f"{interval_s * 800:.0f}ms"},
        "scrape_configs": [
            {
                "job_name": "bench",
                "metrics_path": path,
                "static_configs": [{"targets": [f"{address_of(index)}:{port}" for index in range(targets)]}],
                **({} if names is None else {"params": {"name[]": list(names)}}),
            }
        ],
    }
    file = folder / "prometheus.json"
    file.write_text(json.dumps(config))  # JSON is YAML
    command = [shutil.which("prometheus") or "prometheus", f"--config.file={file}", f"--storage.tsdb.path={data}"]
    command += [f"--web.listen-address=127.0.0.1:{listen}", "--log.level=warn"]
    with running(command, folder, "prometheus") as process:
        await_port(listen)
        yield Measured(process, f"http://127.0.0.1:{listen}/metrics")
