"""Prefill and decode calibrated apart: what judges each, which forms rank it, and the blocks that a policy takes."""

import csv
import datetime
import json
import math
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from lab.calibration.calibrating import Calibration, Fitted, Form, calibrate_observed
from lab.calibration.fitting import CalibrationError, Quality, fit_by_answers, fit_fixed, quality
from lab.calibration.fixed import run_fixed, run_staged
from lab.calibration.observations import read_observations
from lab.calibration.report import roles_block, roles_document
from lab.calibration.shares import order_of, z_of
from lab.calibration.signals import raw_qualities
from lab.calibration.stagesweeps import STAGES, StageCapacity
from lab.calibration.sweeps import made_up, requests_for, steps
from lab.calibration.watching import stage_pressures
from lab.calibration.windows import Windows, joined
from lab.evaluation.statistics import Slo
from policy_engine.core.pool.load import OutputMemory, remember_output
from policy_engine.core.pool.tss import ShareState, share_of, waiting_weight_of
from simulator.profiles import packaged_profiles
from simulator.traces.model import TraceRequest
from trimtab.cli.main import app
from trimtab.config.specs import ServicePolicySpec, TokenServiceShare
from trimtab.config.specs import Slo as SloSpec
from trimtab.domain.measurement import ok
from trimtab.domain.role_signals import FrontDoor, RoleSignals
from trimtab.domain.vocabulary import Role

SLO = Slo(ttft_s=2.0, tpot_s=0.075)
PROFILE = "a100-8b-tp1"
DATE = datetime.date(2026, 1, 31)
RPS = {Role.PREFILL: {"chat": 22.0, "prompts": 2.6}, Role.DECODE: {"chat": 22.0, "answers": 7.9}}
NAN = math.nan


def swept(role: Role, kinds: tuple[str, ...], seed: int) -> Windows:
    """Half an hour of a stage's replica alone, kind by kind, in steps of load."""
    capacity = StageCapacity(role, RPS[role])
    found = []
    for place, kind in enumerate(kind for kind in made_up() if kind.name in kinds):
        requests = requests_for(
            [kind], steps(450.0, seed + place), capacity.request_s, replicas=1, duration_s=450.0, seed=seed + place
        )
        found.append(
            run_fixed(requests, profile=packaged_profiles()[PROFILE], slo=SLO, replicas=1, duration_s=450.0, role=role)
        )
    return joined(found)


@pytest.fixture(scope="module")
def simulated() -> dict[Role, Windows]:
    return {role: swept(role, tuple(RPS[role]), 3) for role in STAGES}


@pytest.mark.parametrize(
    ("role", "ttft_s", "tpot_s", "expected"),
    [
        (Role.COLOCATED, 1.0, 0.15, 2.0),
        (Role.COLOCATED, NAN, 0.15, NAN),
        (Role.PREFILL, 1.0, 0.15, 0.5),
        (Role.PREFILL, NAN, 0.15, NAN),
        (Role.DECODE, 1.0, 0.15, 2.0),
        (Role.DECODE, 3.0, 0.015, 1.5),
        (Role.DECODE, NAN, 0.15, 2.0),
        (Role.DECODE, 1.0, NAN, 0.5),
        (Role.DECODE, NAN, NAN, NAN),
    ],
)
def test_a_stage_is_judged_by_its_own_latencies(role: Role, ttft_s: float, tpot_s: float, expected: float) -> None:
    found = stage_pressures(role, np.array([ttft_s]), np.array([tpot_s]), SLO)
    assert found.tolist() == pytest.approx([expected], nan_ok=True)


def test_stages_hand_over_and_each_sees_its_own_work() -> None:
    """One request: 4,000 prompt tokens are computed by prefill, 100 tokens are made by decode."""
    profile = packaged_profiles()[PROFILE]
    found = run_staged(
        [TraceRequest(7.0, "s", 4000, 100)],
        prefill=profile,
        decode=profile,
        slo=SLO,
        prefill_replicas=1,
        decode_replicas=1,
        duration_s=20.0,
    )
    prefill, decode = found[Role.PREFILL], found[Role.DECODE]
    assert 5 * prefill.prefill_tps.sum() == pytest.approx(4000, rel=0.01)
    assert 5 * prefill.decode_tps.sum() == pytest.approx(1, rel=0.01)
    assert 5 * decode.prefill_tps.sum() == pytest.approx(1, rel=0.01), "the last prompt token is computed again"
    assert 5 * decode.decode_tps.sum() == pytest.approx(100, rel=0.01)
    assert (prefill.requests.sum(), decode.requests.sum()) == (1, 1)
    # 4,000 tokens take about 0.3 s of 2; a token alone about 11 ms of 75, KV is there after 26 ms.
    assert 0.1 < prefill.pressure[prefill.judged][0] < 0.25
    assert 0.1 < decode.pressure[decode.judged][0] < 0.25


def test_a_stage_alone_serves_what_it_serves_within_a_service() -> None:
    profile = packaged_profiles()[PROFILE]
    requests = [TraceRequest(0.05 + 0.1 * place, "s", 800, 60) for place in range(200)]
    whole = run_staged(
        requests, prefill=profile, decode=profile, slo=SLO, prefill_replicas=1, decode_replicas=1, duration_s=30.0
    )
    for role in STAGES:
        alone = run_fixed(requests, profile=profile, slo=SLO, replicas=1, duration_s=30.0, role=role)
        assert alone.prefill_tps.sum() == pytest.approx(whole[role].prefill_tps.sum(), rel=0.02)
        assert alone.decode_tps.sum() == pytest.approx(whole[role].decode_tps.sum(), rel=0.02)
        assert alone.requests.sum() == whole[role].requests.sum() == 200
        assert (alone.attained[alone.judged] == 1.0).all()


@pytest.mark.parametrize("role", STAGES)
@pytest.mark.parametrize("form", list(Form))
def test_z_of_a_stage_is_the_policy_engines(simulated: dict[Role, Windows], role: Role, form: Form) -> None:
    windows = simulated[role].take(np.arange(60))
    profile = (fit_by_answers if form is Form.ANSWERS else fit_fixed)(simulated[role], SLO, role)
    found, order = z_of(windows, profile, SLO, role), order_of(windows, profile, SLO, role)
    state, memory = ShareState(), OutputMemory()
    for place in range(len(windows)):
        view = RoleSignals(
            role=role,
            window_end_s=float(windows.end_s[place]),
            prefill_tps=ok(float(windows.prefill_tps[place])),
            decode_tps=ok(float(windows.decode_tps[place])),
            request_rps=ok(float(windows.request_rps[place])),
            running=ok(float(windows.running[place])),
            waiting=ok(float(windows.waiting[place])),
        )
        memory = remember_output(memory, view)
        weight = waiting_weight_of(profile.waiting_weight, SloSpec(ttft_s=2.0, tpot_s=0.075), role, memory.tokens)
        share, state = share_of(profile, view, FrontDoor(), routable=1, previous=state, waiting_weight=weight)
        assert found[place] == pytest.approx(share.z), place
        assert bool(order[place] == math.inf) is share.idle


def test_prompt_tokens_cannot_rank_prefill_across_prompts_of_all_lengths_and_first_tokens_can(
    simulated: dict[Role, Windows],
) -> None:
    """As many prompt tokens a request are little for a long prompt and much for a short one."""
    seen, other = simulated[Role.PREFILL], swept(Role.PREFILL, ("chat", "prompts"), 30)
    first, prompt = fit_by_answers(seen, SLO, Role.PREFILL), fit_fixed(seen, SLO, Role.PREFILL)
    assert (first.waiting_weight, prompt.prefill_weight) == (1.0, 1.0)
    # Half a request a second for each that is there: a TTFT of 2 s, less what the 95th percentile is above the mean.
    assert 0.4 < first.theta_tps < 1.2
    # A prefill stage is often idle, and idle windows are not told apart: above every number they rank alike.
    busy = other.where(np.isfinite(order_of(other, first, SLO, Role.PREFILL)))
    assert quality(busy, first, SLO, Role.PREFILL).spearman > 0.94
    assert quality(busy, prompt, SLO, Role.PREFILL).spearman < 0.88
    ranks = {name: quality(other, share, SLO, Role.PREFILL) for name, share in (("first", first), ("prompt", prompt))}
    assert ranks["first"].spearman > max(raw.spearman or 0 for raw in raw_qualities(other).values())
    assert ranks["first"].spearman > ranks["prompt"].spearman + 0.04
    assert ranks["first"].misjudged < 0.06 < ranks["prompt"].misjudged


def test_decode_is_ranked_by_answers_although_its_tokens_are_flat_at_the_limit(simulated: dict[Role, Windows]) -> None:
    """Once its KV cache is full, decode makes the same tokens for the same running requests, whatever waits."""
    seen, other = simulated[Role.DECODE], swept(Role.DECODE, ("chat", "answers"), 30)
    lost = other.where(other.judged & (other.pressure > 1))
    assert np.std(lost.decode_tps) / np.mean(lost.decode_tps) < 0.1
    assert np.max(lost.pressure) > 4
    found = quality(other, fit_by_answers(seen, SLO, Role.DECODE), SLO, Role.DECODE)
    assert found.spearman > 0.95
    assert found.spearman > max(raw.spearman or 0 for raw in raw_qualities(other).values())
    assert found.attained_above > 0.95 > found.attained_below


def recorded(windows: dict[Role, Windows], path: Path, *, drop: str = "") -> Path:
    """Both stages as a file. TTFT stands for what prefill used, TPOT for decode."""
    names = ["role", "run", "window_end_s", "prefill_tps", "decode_tps", "running", "waiting", "ttft_p95_s",
             "tpot_p95_s", "request_rps", "slo_attainment", "requests"]  # fmt: skip
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [name for name in names if name != drop], extrasaction="ignore")
        writer.writeheader()
        for role, own in windows.items():
            for row in range(len(own)):
                known = not np.isnan(own.pressure[row])
                used = own.pressure[row] if known else NAN
                cells = {name: getattr(own, name)[row] for name in names[3:7] + names[9:10] + names[11:]}
                cells |= {"role": role.value, "run": own.run[row], "window_end_s": own.end_s[row]}
                cells["ttft_p95_s"] = SLO.ttft_s * used if known and role is Role.PREFILL else ""
                cells["tpot_p95_s"] = SLO.tpot_s * used if known and role is Role.DECODE else ""
                cells["slo_attainment"] = own.attained[row] if known else ""
                writer.writerow(cells)
    return path


def policy_of(block: str) -> ServicePolicySpec:
    """A policy with the block's roles, bounds added."""
    roles = [{**role, "maxReplicas": 4} for role in yaml.safe_load(block)["roles"]]
    return ServicePolicySpec.model_validate(
        {"model": "m", "slo": {"ttftS": SLO.ttft_s, "tpotS": SLO.tpot_s}, "roles": roles}
    )


def test_recorded_stages_give_roles_that_a_policy_takes(simulated: dict[Role, Windows], tmp_path: Path) -> None:
    path = recorded(simulated, tmp_path / "stages.csv")
    read = read_observations(path, SLO)
    assert list(read) == [Role.PREFILL, Role.DECODE]
    for role, own in read.items():
        assert own.pressure.tolist() == pytest.approx(simulated[role].pressure.tolist(), nan_ok=True)
    out = tmp_path / "roles.yaml"
    arguments = ["calibrate", "--observations", str(path), "--slo-ttft", "2", "--slo-tpot", "0.075"]
    result = CliRunner().invoke(app, [*arguments, "--disaggregated", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "Z, first tokens (chosen)" in result.output
    assert "Z, waiting by answers (chosen)" in result.output
    assert out.read_text() in result.output
    policy = policy_of(out.read_text())
    said = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)["roles"]
    for role, stage in zip(STAGES, said, strict=True):
        share = policy.share_profile(role)
        assert share == TokenServiceShare.model_validate(stage["tokenServiceShare"])
        assert stage["role"] == role.value
        assert stage["source"].startswith(f"{path}, ")
        assert f"# version {stage['version']}, for {role} of TTFT 2 s and TPOT 75 ms" in out.read_text()
        assert 0 <= stage["forms"]["answers"]["judged"]["misjudged"] < 0.2
        assert stage["forms"].keys() == {"answers", "fixed"}
    assert policy.share_profile(Role.PREFILL) != policy.share_profile(Role.DECODE)


@pytest.mark.parametrize(
    ("z", "waiting", "notes"),
    [
        (0.97, 0.93, []),
        (0.91, 0.93, ["Z, prompt tokens: ranks health no better (0.910) than waiting alone (0.930)"]),
        (0.93, 0.93, ["Z, prompt tokens: ranks health no better (0.930) than waiting alone (0.930)"]),
        (0.88, 0.70, ["Z, prompt tokens: ranks health with 0.880, below the 0.9 that is asked for"]),
        (0.88, None, ["Z, prompt tokens: ranks health with 0.880, below the 0.9 that is asked for"]),
        (None, 0.93, ["Z, prompt tokens: does not vary on the windows that no fit saw, so it ranks nothing"]),
    ],
)
def test_what_does_not_rank_is_said_beside_what_does(z: float | None, waiting: float | None, notes: list[str]) -> None:
    share = TokenServiceShare(theta_tps=1.0)
    forms = {
        form: Fitted(share, Quality(9, 0.9, 0.7), Quality(9, rank, 0.7))
        for form, rank in ((Form.ANSWERS, 0.99), (Form.FIXED, z))
    }
    raw = {"running": Quality(9, 0.2, 0.1), "waiting": Quality(9, waiting, 0.5)}
    found = Calibration(role=Role.PREFILL, source="x", slo=SLO, form=Form.ANSWERS, forms=forms, raw=raw)
    assert list(found.notes) == notes
    assert [line for line in roles_block({Role.PREFILL: found}, DATE).splitlines() if "ranks" in line] == [
        f"# {note}" for note in notes
    ]
    assert roles_document({Role.PREFILL: found}, DATE)["roles"][0]["notes"] == notes


def test_a_prefill_stage_needs_no_finished_requests_and_decode_does(
    simulated: dict[Role, Windows], tmp_path: Path
) -> None:
    read = read_observations(recorded(simulated, tmp_path / "w.csv", drop="request_rps"), SLO)
    prefill = calibrate_observed(read[Role.PREFILL], SLO, source="w.csv", role=Role.PREFILL)
    assert prefill.forms.keys() == {Form.ANSWERS, Form.FIXED}
    with pytest.raises(CalibrationError, match="without request_rps"):
        calibrate_observed(read[Role.DECODE], SLO, source="w.csv", role=Role.DECODE)


def test_a_stage_whose_slo_never_breaks_is_named(simulated: dict[Role, Windows]) -> None:
    own = simulated[Role.DECODE]
    healthy = own.where(own.pressure < 0.8)
    with pytest.raises(CalibrationError, match=r"^decode: every window keeps the SLO"):
        calibrate_observed(healthy, SLO, source="x", role=Role.DECODE)


HEADER = "role,window_end_s,prefill_tps,decode_tps,running,waiting,ttft_p95_s,tpot_p95_s\n"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("prefil,5,1,1,1,1,1,1\n", "w.csv:2: role: 'prefil' is not one of colocated, prefill, decode"),
        ("prefill-ffn,5,1,1,1,1,1,1\n", "w.csv:2: role: 'prefill-ffn' is not one of"),
        ("prefill,5,1,1,1,1,1,\n,5,1,1,1,1,1,1\n", "w.csv:3: role: is not prefill or decode, as that of other rows"),
        ("decode,5,1,1,1,1,,1\ndecode,5,1,1,1,1,,1\n", "w.csv:3: window_end_s: 5 does not come after"),
    ],
)
def test_roles_that_cannot_be_read_are_refused_with_their_line(rows: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "w.csv"
    path.write_text(HEADER + rows)
    with pytest.raises(CalibrationError) as caught:
        read_observations(path, SLO)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--profile", PROFILE, "--decode-profile", PROFILE], "--decode-profile goes with --profile and --disagg"),
        (["--profile", PROFILE, "--disaggregated", "--decode-profile", "none"], "profile 'none' is not known"),
        (["--observations", "{file}", "--disaggregated"], "--disaggregated needs a column role"),
    ],
)
def test_the_command_says_in_a_line_what_is_wrong_with_stages(arguments: list[str], said: str, tmp_path: Path) -> None:
    path = tmp_path / "w.csv"
    path.write_text(HEADER.removeprefix("role,") + "5,1,1,1,1,1,1\n")
    arguments = [part.format(file=path) for part in arguments]
    result = CliRunner().invoke(app, ["calibrate", "--slo-ttft", "2", "--slo-tpot", "0.075", *arguments])
    assert result.exit_code == 1
    assert said in str(result.exception)
