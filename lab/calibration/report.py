"""A calibration as people and machines read it: the block of a ServicePolicy, and a document."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
from collections.abc import Mapping

import yaml

from lab.calibration.calibrating import Calibration
from lab.calibration.fitting import Quality
from trimtab.config.specs import TokenServiceShare
from trimtab.domain.vocabulary import Role


def version_of(share: TokenServiceShare, date: datetime.date) -> str:
    """Date and digest of the scalars: equal profiles of one day have equal versions."""
    text = json.dumps(_scalars(share), sort_keys=True)
    return f"{date.isoformat()}-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


def policy_block(calibration: Calibration, date: datetime.date) -> str:
    """`tokenServiceShare` for the spec of a ServicePolicy, with version, source and fit as comments."""
    body = yaml.safe_dump({"tokenServiceShare": _scalars(calibration.chosen.share)}, sort_keys=False)
    return _comments(calibration, date) + body


def roles_block(calibrations: Mapping[Role, Calibration], date: datetime.date) -> str:
    """`roles` for the spec of a disaggregated service's ServicePolicy: each stage with a profile of its own."""
    parts = ["roles:\n"]
    for role, calibration in calibrations.items():
        entry = {"role": role.value, "tokenServiceShare": _scalars(calibration.chosen.share)}
        parts += [_comments(calibration, date), yaml.safe_dump([entry], sort_keys=False)]
    return "".join(parts)


def document(calibration: Calibration, date: datetime.date) -> dict[str, object]:
    """Everything, as plain data."""
    return {
        "version": version_of(calibration.chosen.share, date),
        "date": date.isoformat(),
        "role": calibration.role.value,
        "source": calibration.source,
        "slo": {"ttft_s": calibration.slo.ttft_s, "tpot_s": calibration.slo.tpot_s},
        "form": calibration.form.value,
        "tokenServiceShare": _scalars(calibration.chosen.share),
        "forms": {
            form.value: {
                "tokenServiceShare": _scalars(fitted.share),
                "fit": dataclasses.asdict(fitted.fit),
                "judged": dataclasses.asdict(fitted.judged),
            }
            for form, fitted in calibration.forms.items()
        },
        "raw_signals": {name: dataclasses.asdict(found) for name, found in calibration.raw.items()},
        "notes": list(calibration.notes),
    }


def roles_document(calibrations: Mapping[Role, Calibration], date: datetime.date) -> dict[str, object]:
    """The documents of all stages."""
    return {"roles": [document(calibration, date) for calibration in calibrations.values()]}


def _comments(calibration: Calibration, date: datetime.date) -> str:
    chosen, slo = calibration.chosen, calibration.slo
    above, below = chosen.judged.attained_above, chosen.judged.attained_below
    targets = f"TTFT {slo.ttft_s:g} s and TPOT {1000 * slo.tpot_s:g} ms"
    stage = "" if calibration.role is Role.COLOCATED else f"{calibration.role} of "
    sides = f"{_share(chosen.fit.misjudged)} in the fit, {_share(chosen.judged.misjudged)} elsewhere"
    lines = [
        f"version {version_of(chosen.share, date)}, for {stage}{targets}",
        f"source: {calibration.source}",
        f"rank correlation of Z with SLO health: {_rank(chosen.fit)} in the fit, {_rank(chosen.judged)} elsewhere",
        f"requests within the SLO: {_share(above)} where Z >= 1, {_share(below)} below",
        f"windows on the wrong side of Z = 1: {sides}",
        *calibration.notes,
    ]
    return "".join(f"# {line}\n" for line in lines)


def _scalars(share: TokenServiceShare) -> dict[str, float | None]:
    """Fields in YAML's spelling; those that are not set are left out."""
    scalars: dict[str, float | None] = share.model_dump(mode="json", by_alias=True, exclude_none=True)
    return scalars


def _rank(found: Quality) -> str:
    return "unknown" if found.spearman is None else f"{found.spearman:.3f}"


def _share(value: float | None) -> str:
    return "none" if value is None else f"{100 * value:.1f} %"
