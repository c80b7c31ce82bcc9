"""The packaged profiles, one YAML file each; `python -m lab.fit_profiles` writes their fitted part."""

from __future__ import annotations

import functools
import importlib.resources
from pathlib import Path

import pydantic
import yaml

from simulator.core.profile import Profile


class ProfileError(ValueError):
    """A profile cannot be read; the text names the file, the key and what is wrong."""


def parse_profile(text: str, where: str) -> Profile:
    """Parse a profile's YAML; raises ProfileError naming `where`."""
    try:
        profile = Profile.model_validate(yaml.safe_load(text))
        profile.engine_limits()
    except yaml.YAMLError as error:
        raise ProfileError(f"{where}: not YAML: {error}") from error
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"]) or "(document)"
        raise ProfileError(f"{where}: {path}: {first['msg']}") from error
    except ValueError as error:
        raise ProfileError(f"{where}: {error}") from error
    return profile


@functools.cache
def packaged_profiles() -> dict[str, Profile]:
    """Every packaged profile by name, sorted."""
    files = [f for f in importlib.resources.files(__name__).iterdir() if f.name.endswith(".yaml")]
    profiles = [parse_profile(f.read_text(encoding="utf-8"), f.name) for f in files]
    return {p.name: p for p in sorted(profiles, key=lambda p: p.name)}


def load_profiles(extra_dir: Path | None = None) -> dict[str, Profile]:
    """The packaged profiles and, over them, those of a folder. Raises ProfileError when it is none."""
    if extra_dir is not None and not extra_dir.is_dir():
        raise ProfileError(f"{extra_dir}: there is no such folder; name one that holds profiles (*.yaml)")
    profiles = dict(packaged_profiles())
    for path in sorted(extra_dir.glob("*.yaml")) if extra_dir is not None else ():
        profile = parse_profile(path.read_text(encoding="utf-8"), str(path))
        profiles[profile.name] = profile
    return profiles


def find_profile(profiles: dict[str, Profile], name: str) -> Profile:
    """A profile by name; raises ProfileError naming those that exist."""
    profile = profiles.get(name)
    if profile is None:
        raise ProfileError(f"profile {name!r} is not known; there are {', '.join(sorted(profiles))}")
    return profile
