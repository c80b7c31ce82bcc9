"""What terminals of 80 and 140 columns show of a service, its numbers and its targets: whole, not cut off."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType

from trimtab.api.collector.v1 import collector_pb2
from trimtab.api.common.v1 import types_pb2
from trimtab.api.policy.v1 import policy_pb2
from trimtab.cli.status import render
from trimtab.cli.targets import table_of
from trimtab.views.status import Answers
from trimtab.views.targets import target_row

LEGEND = "~ of a part of its replicas, warming up, counted anew or stale"


def lines_of(item: RenderableType, width: int) -> list[str]:
    shown = Console(file=io.StringIO(), width=width, record=True)
    shown.print(item)
    return [line.strip("│ ").rstrip() for line in shown.export_text().splitlines()]


def number(value: float, quality: types_pb2.Quality.ValueType = types_pb2.QUALITY_OK) -> types_pb2.Measurement:
    return types_pb2.Measurement(value=value, quality=quality, reported=2, expected=3)


def picture(quality: types_pb2.Quality.ValueType, name: str = "chat") -> Answers:
    role = policy_pb2.RoleStatus(
        role=types_pb2.ROLE_COLOCATED,
        desired=5,
        routable=3,
        decode_tps=number(1092, quality),
        prefill_tps=number(26574, quality),
        running=number(16.6, quality),
        waiting=number(26.4, quality),
        ttft_p95_s=number(14.86, quality),
        tpot_p95_s=number(0.147, quality),
        replicas={"LIFE_CYCLE_ACTIVE": 3, "LIFE_CYCLE_DRAINING": 2, "LIFE_CYCLE_SLEEPING": 3},
    )
    service = policy_pb2.ServiceStatus(service=name, z=0.08, roles=[role], held=number(12, quality))
    return Answers(status=policy_pb2.GetStatusResponse(leader=True, services=[service]), decisions=())


@pytest.mark.parametrize(
    ("width", "quality", "expected"),
    [
        (80, types_pb2.QUALITY_OK, "chat colocated 0.08 1092 26.4 14.86 s 0.147 s 3/5"),
        (80, types_pb2.QUALITY_WARMING, "chat colocated 0.08 1092~ 26.4~ 14.86 s~ 0.147 s~ 3/5"),
        (
            140,
            types_pb2.QUALITY_PARTIAL,
            "chat colocated 0.08 1092~ 26574~ 16.6~ 26.4~ 12~ 14.86 s~ 0.147 s~ 3/5 3 active, 2 draining, 3 sleeping",
        ),
    ],
)
def test_every_number_of_a_service_is_shown_whole(
    width: int, quality: types_pb2.Quality.ValueType, expected: str
) -> None:
    lines = lines_of(render(picture(quality), width=width), width)
    assert expected in [" ".join(line.split()) for line in lines]
    assert (LEGEND in lines) == (quality != types_pb2.QUALITY_OK)


def test_where_there_is_room_it_is_said_why_a_number_is_less_than_ok() -> None:
    lines = lines_of(render(picture(types_pb2.QUALITY_PARTIAL), width=160), 160)
    assert any("1092 (2/3)" in line for line in lines)
    assert LEGEND not in lines


def test_a_long_name_is_folded_and_takes_no_room_from_the_numbers() -> None:
    name = "a-service-whose-name-is-as-long-as-names-may-be-0123456789-0123"
    lines = lines_of(render(picture(types_pb2.QUALITY_OK, name), width=80), 80)
    row = next(line for line in lines if "colocated" in line)
    assert row.split()[1:] == ["colocated", "0.08", "1092", "26.4", "14.86", "s", "0.147", "s", "3/5"]
    start = lines.index(row)
    assert "".join(line.split()[0] for line in lines[start:] if line and line[0] in name).startswith(name)


def test_a_target_is_shown_whole_with_its_error_below() -> None:
    target = collector_pb2.Target(
        target_id="assist-decode-9540b3c1",
        service="assist",
        role=types_pb2.ROLE_DECODE,
        address="http://127.0.0.1:24122",
        source="actuator/local",
        state=collector_pb2.TARGET_STATE_DOWN,
        counted=True,
        last_error="connection refused",
    )
    narrow = lines_of(table_of([target_row(target)], width=80), 80)
    assert narrow[1].split() == ["assist-decode-9540b3c1", "down", "yes", "–"]
    assert " ".join(narrow[2:]).split() == [
        *("assist,", "decode,", "http://127.0.0.1:24122,", "actuator/local", "connection", "refused")
    ]
    (_, row, *_) = lines_of(table_of([target_row(target)], width=140), 140)
    assert row.split()[:4] == ["assist-decode-9540b3c1", "assist", "decode", "http://127.0.0.1:24122"]
    assert row.endswith("connection refused")
