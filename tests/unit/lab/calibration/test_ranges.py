"""Each model's own loads: the search, the packaged figures, and what their file may hold."""

from pathlib import Path

import pytest
import yaml

from lab.calibration.ranges import TARGETS, attained, found_range, packaged_ranges, read_ranges, to_document
from lab.suites.tre_setup import TRAINING_SEEDS
from simulator.traces.probes import MODELS, PROBES
from trimtab.config.yamlfile import YamlError


@pytest.mark.parametrize("start", [0.05, 1.0, 30.0])
def test_the_search_finds_both_ends_of_a_range_with_factors_as_they_are_written(start: float) -> None:
    asked: list[float] = []

    def falling(scale: float) -> float:
        asked.append(scale)
        return 1.0 / (1.0 + (scale / 4.0) ** 2)

    found = found_range(falling, start)
    assert list(found) == list(TARGETS)
    for name, load in found.items():
        assert load.static_attainment == pytest.approx(TARGETS[name], abs=0.016)
        assert load.rate_scale in asked
        assert load.static_attainment == pytest.approx(falling(load.rate_scale), abs=1e-4)
    assert all(round(scale, 4) == scale for scale in asked)


def test_every_model_goes_from_health_to_trouble_on_every_trace() -> None:
    ranges = packaged_ranges()
    assert list(ranges) == list(MODELS)
    for model, traces in ranges.items():
        assert list(traces) == list(PROBES)
        for trace, loads in traces.items():
            for name, load in loads.items():
                assert load.static_attainment == pytest.approx(TARGETS[name], abs=0.04), (model, trace, name)
            assert loads["light"].rate_scale < loads["heavy"].rate_scale


@pytest.mark.parametrize("model", MODELS)
def test_the_packaged_loads_of_the_shortest_trace_still_attain_what_they_say(model: str) -> None:
    load = packaged_ranges()[model]["real-code"]["light"]
    assert attained(model, "real-code", load.rate_scale, TRAINING_SEEDS) == pytest.approx(
        load.static_attainment, abs=0.004
    )


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "ranges.yaml"
    path.write_text(yaml.safe_dump(to_document(packaged_ranges())), encoding="utf-8")
    assert read_ranges(path) == packaged_ranges()


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("rate_scale",), 0.0),
        (("rate_scale",), -1.0),
        (("rate_scale",), "1.0"),
        (("rate_scale",), float("nan")),
        (("attainment",), 1.5),
        (("attainment",), None),
        ((), {}),
        ((), None),
    ],
    ids=["zero", "negative", "text", "nan", "share", "empty", "no-keys", "no-load"],
)
def test_a_file_that_lacks_a_load_is_refused_with_its_name(
    tmp_path: Path, place: tuple[str, ...], value: object
) -> None:
    document = yaml.safe_load(yaml.safe_dump(to_document(packaged_ranges())))
    loads = document[MODELS[1]]["decode"]
    if place:
        loads["heavy"][place[0]] = value
    else:
        loads["heavy"] = value
    path = tmp_path / "ranges.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    with pytest.raises(YamlError, match=r"ranges\.yaml: not what --write makes .*write it anew with --write"):
        read_ranges(path)
    path.write_text("", encoding="utf-8")
    with pytest.raises(YamlError, match=r"not what --write makes"):
        read_ranges(path)
