"""The folder that an evaluation is written to. What this command did not write there, it never writes over."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from lab.evaluation.suite import SuiteError

_MANIFEST = ".trimtab-evaluation"
"""In the folder: the names of all files that were written, one a line."""


@dataclasses.dataclass(frozen=True, slots=True)
class Folder:
    """A folder whose own files are known."""

    path: Path
    own: frozenset[str]

    @classmethod
    def claimed(cls, path: Path) -> Folder:
        """A folder that may be there or not, made if need be. Raises `SuiteError` when it cannot be used.

        Before a run, so that hours of work do not end without a place to go to.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            manifest = path / _MANIFEST
            own = (
                frozenset(manifest.read_text(encoding="utf-8").split("\n")) - {""} if manifest.exists() else frozenset()
            )
            strange = sorted(name for name in own if not _is_plain(name))
            if strange:
                raise SuiteError(
                    f"--out {path}: {_MANIFEST} names {strange[0]!r}, which is no file of this folder; "
                    "remove that list or name another folder"
                )
            manifest.write_text("".join(f"{name}\n" for name in sorted(own)), encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SuiteError(
                f"--out {path}: {getattr(error, 'strerror', None) or error}; name another folder"
            ) from None
        return cls(path, own)

    def check(self, names: frozenset[str]) -> None:
        """Raises `SuiteError` where one of these files is there and not this command's."""
        foreign = sorted(name for name in names - self.own if (self.path / name).exists())
        if foreign:
            raise SuiteError(
                f"--out {self.path}: {foreign[0]} is there and was not written by trimtab evaluate; "
                "move it away or name another folder"
            )

    def write(self, texts: Mapping[str, str]) -> None:
        """Write files by name, and remove those that an earlier run left and this one has not. Raises `SuiteError`."""
        self.check(frozenset(texts))
        try:
            listed = "".join(f"{name}\n" for name in sorted(self.own | set(texts)))
            (self.path / _MANIFEST).write_text(listed, encoding="utf-8")
            for name, text in texts.items():
                (self.path / name).write_text(text, encoding="utf-8")
            for name in self.own - set(texts):
                (self.path / name).unlink(missing_ok=True)
            (self.path / _MANIFEST).write_text("".join(f"{name}\n" for name in sorted(texts)), encoding="utf-8")
        except OSError as error:
            raise SuiteError(f"--out {self.path}: {error.strerror or error}") from None


def _is_plain(name: str) -> bool:
    """Whether a name stays in its folder. The list of files may come with a folder from anywhere."""
    return name not in (".", "..") and not any(mark in name for mark in "/\\\0")
