"""Folders that a command empties before each run: locked first, and only where the command's own mark is in them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trimtab.cli.addresses import LocalAddresses
from trimtab.cli.local import LOCK_NAME, check_ports, lock_folder, not_writable
from trimtab.cli_errors import CommandError

MARKER_NAME = ".trimtab-run"


@contextmanager
def fresh_folder(folder: Path, addresses: LocalAddresses, *, command: str) -> Iterator[None]:
    """Locks `folder` as `trimtab up` locks its own, empties it, and keeps the lock until the end of the block.

    Nothing is deleted unless the folder is free, the ports are, and the folder is one that was made here.
    Raises CommandError.
    """
    try:
        _mark(folder, command)
    except OSError as error:
        raise not_writable(folder, error) from None
    lock = lock_folder(folder)
    try:
        check_ports(addresses)
        _empty(folder)
        yield
    finally:
        os.close(lock)


def _mark(folder: Path, command: str) -> None:
    """Makes the folder with its mark. The mark is there before all else, so that a run cut short is known, too."""
    folder.mkdir(parents=True, exist_ok=True)
    marker = folder / MARKER_NAME
    if marker.is_file():
        return
    if any(folder.iterdir()):
        raise CommandError(
            f"{folder} holds files that `trimtab {command}` did not write and would delete: "
            "give another folder with --state-dir"
        )
    marker.write_text(f"The next `trimtab {command}` deletes everything in this folder.\n")


def _empty(folder: Path) -> None:
    for inner in sorted(folder.glob(f"*/{LOCK_NAME}")):
        os.close(lock_folder(inner.parent))
    for path in sorted(folder.iterdir()):
        if path.name in (MARKER_NAME, LOCK_NAME):
            continue
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError as error:
            raise CommandError(
                f"cannot delete {error.filename or path}: {error.strerror}; give another folder with --state-dir"
            ) from None
