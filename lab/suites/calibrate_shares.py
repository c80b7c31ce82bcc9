"""`python -m lab.suites.calibrate_shares`: what Token Service Share knows of TRE's three models.

Does what `trimtab calibrate --profile` does for each of them and prints the blocks; `--write` replaces the packaged
file, from which the suite takes its ServicePolicies. `published` is a second block for each, fitted to the same windows
within what the paper says of its scalars: that of the suite's plain rules. No trace of the suite is looked at.
"""

from __future__ import annotations

import datetime
import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
import yaml
from pydantic import ValidationError

from lab.calibration.calibrating import calibrate_profile
from lab.calibration.fitting import CalibrationError, fit_published
from lab.calibration.report import document, policy_block
from lab.calibration.sweeps import Sweep, fit_windows
from lab.evaluation.statistics import Slo
from lab.suites.capacity import token_cost
from lab.suites.tre_setup import SLOS, profiles
from simulator.core.profile import Profile
from trimtab.config.specs import TokenServiceShare
from trimtab.config.yamlfile import YamlError, read_yaml_documents

SHIPPED, PUBLISHED = "tokenServiceShare", "published"
SHARES_FILE = Path(__file__).parent / "tre_shares.yaml"

app = typer.Typer(add_completion=False, help=__doc__)


@app.command()
def main(write: Annotated[bool, typer.Option("--write", help="Write the packaged file.")] = False) -> None:
    """Fit the three profiles."""
    today = datetime.datetime.now(datetime.UTC).date()
    found: dict[str, object] = {}
    for model, profile in profiles().items():
        try:
            calibration = calibrate_profile(profile, SLOS[model], Sweep())
            published = calibrate_published(profile, SLOS[model], Sweep())
        except CalibrationError as error:
            sys.stderr.write(f"error: {model}: {error}\n")
            raise typer.Exit(1) from None
        sys.stdout.write(f"# {model}\n{policy_block(calibration, today)}")
        said = document(calibration, today)
        found[model] = {
            **{name: said[name] for name in ("version", "source", SHIPPED)},
            PUBLISHED: published.model_dump(mode="json", by_alias=True, exclude_none=True),
        }
    if write:
        SHARES_FILE.write_text(yaml.safe_dump(found, sort_keys=False, width=120), encoding="utf-8")


def calibrate_published(profile: Profile, slo: Slo, sweep: Sweep) -> TokenServiceShare:
    """A profile's scalars in the paper's form. Raises `CalibrationError` where no load shows a difference in health."""
    return fit_published(fit_windows(profile, slo, token_cost(profile, slo), sweep), slo)


@functools.cache
def packaged_shares(block: str = SHIPPED) -> Mapping[str, TokenServiceShare]:
    """The packaged profiles, by model: as Trimtab is shipped, or in the paper's form."""
    return read_shares(SHARES_FILE, block)


def read_shares(path: Path, block: str = SHIPPED) -> Mapping[str, TokenServiceShare]:
    """The profiles of a file. Raises `YamlError`, with the file's name and what is wrong."""
    documents = read_yaml_documents(path)
    models = documents[0] if documents and isinstance(documents[0], Mapping) else {}
    try:
        return {str(model): TokenServiceShare.model_validate(entry[block]) for model, entry in models.items()}
    except (KeyError, TypeError, ValidationError) as error:
        where = "; ".join(str(error).splitlines()[:2])
        raise YamlError(f"{path}: not what calibrate_shares writes ({where}); write it anew with --write") from None


if __name__ == "__main__":
    app()
