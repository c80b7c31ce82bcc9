"""Grafana's dashboards ask for nothing that the collector does not give."""

import json
import re
from pathlib import Path

import pytest
import yaml

from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.api.common.v1 import types_pb2

GRAFANA = Path(__file__).parents[3] / "deploy" / "grafana"
BOARDS = sorted((GRAFANA / "dashboards").glob("*.json"))
_NAME = re.compile(r"\b(?:trimtab|process)_[a-z0-9_]+")
_LABEL = re.compile(r'\b(signal|latency|quality)="([a-z0-9_]+)"')


def expressions(board: Path) -> list[str]:
    document = json.loads(board.read_text())
    found = [target["expr"] for panel in document["panels"] for target in panel["targets"]]
    return found + [variable["definition"] for variable in document["templating"]["list"]]


def test_there_is_a_board_for_the_fleet_a_role_and_the_collector() -> None:
    assert [board.stem for board in BOARDS] == ["collector", "fleet", "role"]


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.stem)
async def test_every_metric_of_a_board_is_on_the_collectors_metrics(
    board: Path, start_collector, tmp_path, free_port, eventually
) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps([{"targets": ["127.0.0.1:1"], "labels": {"service": "chat", "role": "decode"}}]))
    collector = await start_collector(targets_files=[path], actuators={"east": f"127.0.0.1:{free_port}"})
    await eventually(lambda: collector.context.registry.get_sample_value("trimtab_collector_rounds_total", WRITTEN))

    given = {
        name
        for family in collector.context.registry.collect()
        for name in {family.name, *(sample.name for sample in family.samples)}
    }
    asked = {name for expression in expressions(board) for name in _NAME.findall(expression)}

    assert asked
    assert asked - given - PROCESS == set()


WRITTEN = {"outcome": "written"}
# On every service's /metrics (prometheus_client's process collector), not in a registry of one test.
PROCESS = {"process_cpu_seconds_total", "process_resident_memory_bytes"}


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.stem)
def test_every_signal_latency_and_quality_of_a_board_is_one(board: Path) -> None:
    words = {
        "signal": {name.removeprefix("SIGNAL_").lower() for name in pb.Signal.DESCRIPTOR.values_by_name},
        "latency": {name.removeprefix("LATENCY_").lower() for name in pb.Latency.DESCRIPTOR.values_by_name},
        "quality": {name.removeprefix("QUALITY_").lower() for name in types_pb2.Quality.DESCRIPTOR.values_by_name},
    }
    asked = [match for expression in expressions(board) for match in _LABEL.findall(expression)]

    assert [(label, word) for label, word in asked if word not in words[label]] == []


def test_boards_read_from_the_data_source_that_is_provisioned() -> None:
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"]

    for board in BOARDS:
        assert {panel["datasource"]["uid"] for panel in json.loads(board.read_text())["panels"]} == {source["uid"]}
    assert source["url"] == "http://prometheus:9090"


def test_grafanas_container_is_hardened_and_on_loopback_and_finds_what_is_provisioned() -> None:
    service = yaml.safe_load((GRAFANA.parent / "docker-compose.monitoring.yml").read_text())["services"]["grafana"]
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/trimtab.yml").read_text())["providers"]

    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert service["ports"] == ["127.0.0.1:3000:3000"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in service["volumes"]
