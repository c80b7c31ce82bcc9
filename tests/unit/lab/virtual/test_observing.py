"""What the collector's cores say on virtual time: the same as of pages, and the same as through messages and merge."""

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.virtual.observing import VirtualCollector
from lab.virtual.recording import SCHEMA, EngineRecorder
from metrics_collector.core.liveness import judge_all
from metrics_collector.core.page import PageReader
from metrics_collector.core.roles import ExpectedReplicas, replica_values, role_windows
from metrics_collector.core.schema import COUNTER_COLUMN, GAUGE_COLUMN, Reading
from metrics_collector.core.table import SeriesTable
from metrics_collector.core.targets import ROLES, Target
from metrics_collector.core.window import Window
from policy_engine.core.shared.vocabulary import MemberKey
from simulator.core.engine import Engine
from simulator.core.event_engine import EventEngine
from simulator.core.profile import Profile
from simulator.core.requests import EngineRequest, FinishedRequest
from simulator.profiles import packaged_profiles
from simulator.server.exposition import Gauge as PageGauge
from simulator.server.exposition import Page
from simulator.server.vllm_metrics import RequestParams, VllmMetrics
from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.config.dialects import load_dialects
from trimtab.domain.measurement import Measurement
from trimtab.domain.role_merge import merge
from trimtab.domain.role_signals import RoleSignals, role_signals
from trimtab.domain.role_window import role_window_from_proto, role_window_to_proto
from trimtab.domain.signals import Counter, Gauge
from trimtab.domain.vocabulary import Quality, Role

CHAT = MemberKey("chat", Role.COLOCATED)
SIGNALS = [item.name for item in dataclasses.fields(RoleSignals) if item.name not in ("role", "window_end_s")]


@dataclasses.dataclass(frozen=True)
class Arrival:
    """One request, and when its client gives up, if it does."""

    at_s: float
    request: EngineRequest
    abort_s: float = math.inf


def workload(seed: int, *, rps: float, until_s: float) -> list[Arrival]:
    """Short and long prompts, some with a prefix that others have too, some given up half-way."""
    rng = random.Random(seed)
    found: list[Arrival] = []
    at_s = 0.0
    while (at_s := at_s + rng.expovariate(rps)) < until_s:
        prompt = rng.choice([40, 900, 3000, 9000])
        hashes = (
            tuple(range(20)) + tuple(1000 * len(found) + n for n in range(20, prompt // 16)) if prompt > 400 else ()
        )
        request = EngineRequest(f"r{len(found)}", prompt, rng.randint(1, 300), block_hashes=hashes)
        found.append(Arrival(at_s, request, at_s + rng.uniform(0, 5) if rng.random() < 0.1 else math.inf))
    return found


class Served:
    """An engine that is stepped, with the page of its server; the live server's recorder without its clock."""

    def __init__(self, profile: Profile) -> None:
        self.engine = Engine(profile.engine_limits(), profile.iteration_model())
        self.page = Page(lambda: None)
        self.page.add(PageGauge("process_start_time_seconds", "Start.", ((),))).set(0.0)
        self.metrics = VllmMetrics(
            self.page, model_name="m", engine="0", limits=self.engine.limits, kv_cache_bytes=1, created_s=0.0
        )
        self.metrics.record_sleep_state({"awake": 1.0, "weights_offloaded": 0.0, "discard_all": 0.0})
        self._end_s: float | None = None

    def submit(self, request: EngineRequest, now_s: float) -> None:
        self.engine.submit(request, now_s)
        if self._end_s is None:
            self._end_s = self.engine.begin_step(now_s)

    def abort(self, request_id: str, now_s: float) -> None:
        if (ended := self.engine.abort(request_id, now_s)) is not None:
            self._write(ended)
            self.metrics.record_gauges(self.engine)

    def advance(self, until_s: float) -> None:
        while self._end_s is not None and self._end_s < until_s:
            outcome = self.engine.end_step()
            self.metrics.record_step(outcome)
            self.metrics.record_gauges(self.engine)
            for finished in outcome.finished:
                self._write(finished)
            self._end_s = self.engine.begin_step(outcome.ended_s)

    def reading(self, reader: PageReader) -> Reading:
        self.metrics.record_counters(self.engine)
        return reader.read(self.page.render().encode(), None)[0]

    def _write(self, finished: FinishedRequest) -> None:
        self.metrics.record_finished(finished, RequestParams(1, finished.request.output_tokens))


class Jumped:
    """The same engine in jumps, with its recorder."""

    def __init__(self, profile: Profile) -> None:
        self.engine = EventEngine(profile.engine_limits(), profile.iteration_model())
        self.recorder = EngineRecorder(self.engine)

    def submit(self, request: EngineRequest, now_s: float) -> None:
        self.engine.submit(request, now_s)

    def abort(self, request_id: str, now_s: float) -> None:
        if (ended := self.engine.abort(request_id, now_s)) is not None:
            self.recorder.finished(ended)

    def advance(self, until_s: float) -> None:
        while self.engine.next_s < until_s:
            for finished in self.engine.fire():
                self.recorder.finished(finished)


def drive(engine: Served | Jumped, arrivals: Sequence[Arrival], from_s: float, until_s: float) -> None:
    events = [(a.at_s, 0, a) for a in arrivals] + [(a.abort_s, 1, a) for a in arrivals]
    for at_s, kind, arrival in sorted(events, key=lambda event: event[:2]):
        if from_s <= at_s < until_s:
            engine.advance(at_s)
            if kind == 0:
                engine.submit(arrival.request, at_s)
            else:
                engine.abort(arrival.request.request_id, at_s)
    engine.advance(until_s)


def test_windows_are_those_of_the_pages_that_a_server_would_show() -> None:
    profile = packaged_profiles()["a100-8b-tp1"]
    reader = PageReader(load_dialects())
    pages, virtual = VirtualCollector(), VirtualCollector()
    arrivals = {f"chat-{n}": workload(n, rps=2.5, until_s=35.0) for n in range(2)}
    served = {name: Served(profile) for name in arrivals}
    jumped = {name: Jumped(profile) for name in arrivals}
    for name in arrivals:
        for collector in (pages, virtual):
            collector.add(name, "chat", Role.COLOCATED, 1)
    compared = 0
    for second in range(1, 61):
        now_s = float(second)
        for name in arrivals:
            drive(served[name], arrivals[name], now_s - 1, now_s)
            drive(jumped[name], arrivals[name], now_s - 1, now_s)
        pages.scrape(now_s, {name: one.reading(reader) for name, one in served.items()})
        virtual.scrape(now_s, {name: one.recorder.reading(now_s) for name, one in jumped.items()})
        routable = {CHAT: list(arrivals)}
        live, ours = pages.signals(now_s, routable)[0][CHAT], virtual.signals(now_s, routable)[0][CHAT]
        for name in SIGNALS:
            expected, found = getattr(live, name), getattr(ours, name)
            assert (found.quality, found.reported) == (expected.quality, expected.reported), (second, name)
            if expected.value is None:
                assert found.value is None
            elif name in ("running", "waiting"):
                # A page shows the end of the last iteration, and this the moment.
                assert found.value == pytest.approx(expected.value, rel=0.1, abs=1.0), second
            elif name == "kv_usage_ratio":
                assert found.value == pytest.approx(expected.value, abs=0.03), second
            elif name == "tbt_p95_s":
                assert found.value == pytest.approx(expected.value, rel=0.25), second
            else:
                assert found.value == pytest.approx(expected.value, rel=1e-6, abs=1e-9), (second, name)
                compared += 1
    assert compared > 150
    assert live.running.value == ours.running.value == 0.0


def reading(*, awake: float = 1.0, running: float, decoded: float, ttft_bucket: int = 5, finished: int = 0) -> Reading:
    """A page of few numbers: all requests' first tokens in one bucket."""
    values = [0.0] * SCHEMA.width
    values[GAUGE_COLUMN[Gauge.AWAKE]] = awake
    values[GAUGE_COLUMN[Gauge.RUNNING]] = running
    values[GAUGE_COLUMN[Gauge.WAITING]] = running / 2
    values[GAUGE_COLUMN[Gauge.KV_USAGE_RATIO]] = values[GAUGE_COLUMN[Gauge.KV_USAGE_MAX_RATIO]] = running / 100
    values[COUNTER_COLUMN[Counter.DECODE_TOKENS]] = decoded
    values[COUNTER_COLUMN[Counter.FINISHED]] = finished
    for columns in SCHEMA.histograms.values():
        for bucket in range(min(columns.first + ttft_bucket, columns.last), columns.last + 1):
            values[bucket] = finished
        values[columns.sum] = 0.01 * finished
    return Reading(SCHEMA, values)


def through_messages(
    table: SeriesTable, targets: Mapping[str, MemberKey], routable: Mapping[MemberKey, Sequence[str]], end_s: float
) -> dict[MemberKey, RoleSignals]:
    """The live way: partials as messages, merged, read by the policy engine."""
    expected_replicas = ExpectedReplicas.of(
        Target(
            target_id=name,
            address="",
            service=key.service,
            role=ROLES[key.role.value],
            replica=name,
            cluster="",
            gpus=1,
            source="actuator/test",
            counted=name in routable.get(key, ()),
            routable_by_actuator=name in routable.get(key, ()),
        )
        for name, key in targets.items()
    )
    windows = table.close(expected_replicas.target_ids, Window(start_s=end_s - 5, end_s=end_s))
    verdicts = judge_all(expected_replicas.target_ids, windows, {}, limits_s=expected_replicas.limits_s(lambda _: 10.0))
    values = replica_values(expected_replicas, windows, verdicts, None)
    closed = role_windows(expected_replicas, windows, verdicts, values, collector="c", replica_revisions={})
    found: dict[MemberKey, RoleSignals] = {}
    for data in [role_window_to_proto(window).SerializeToString() for window in closed]:
        window = role_window_from_proto(pb.RolePartial.FromString(data))
        assert window.role is not None
        key = MemberKey(window.service, window.role)
        if key in routable:
            found[key] = role_signals(key.role, merge([window], expected=routable[key]))
    return found


def without_detail(signal: Measurement) -> tuple[float | None, Quality, int, int]:
    return (None if signal.value is None else round(signal.value, 9), signal.quality, signal.reported, signal.expected)


MEMBERS = (CHAT, MemberKey("code", Role.PREFILL), MemberKey("code", Role.DECODE))
NAMES = {f"{key.service}-{key.role.value}-{n}": key for key in MEMBERS for n in range(2)}
Step = st.fixed_dictionaries(
    {name: st.sampled_from(["busy", "idle", "asleep", "still", "silent", "restarted"]) for name in NAMES}
)


@settings(max_examples=40, deadline=None)
@given(st.lists(Step, min_size=3, max_size=16), st.sets(st.sampled_from(sorted(NAMES))), st.booleans())
def test_signals_are_what_messages_and_merge_would_have_brought(
    steps: list[dict[str, str]], counted: set[str], stranger: bool
) -> None:
    collector, table = VirtualCollector(), SeriesTable()
    for name, key in NAMES.items():
        collector.add(name, key.service, key.role, 1)
        table.add(name, keep_s=5.0)
    routable = {key: [name for name in sorted(counted) if NAMES[name] == key] for key in MEMBERS}
    if stranger:
        routable[CHAT].append("nobody-knows-it")
    decoded = dict.fromkeys(NAMES, 0.0)
    for number, step in enumerate(steps, start=1):
        readings: dict[str, Reading] = {}
        for place, (name, what) in enumerate(step.items()):
            if what == "silent":
                continue
            decoded[name] = 3.0 if what == "restarted" else decoded[name] + (100.0 + place if what == "busy" else 0.0)
            running = 0.0 if what == "idle" else 3.0 + place
            readings[name] = reading(
                awake=0.0 if what == "asleep" else 1.0,
                running=running,
                decoded=decoded[name],
                ttft_bucket=place,
                finished=int(decoded[name] // 50),
            )
        now_s = 100.0 + 2.0 * number
        collector.scrape(now_s, readings)
        for name, item in readings.items():
            table.put(name, item, at_s=now_s)
    found, _ = collector.signals(now_s, routable)
    expected = through_messages(table, NAMES, routable, now_s)
    assert found.keys() == expected.keys() == set(MEMBERS)
    for key, view in expected.items():
        assert found[key].window_end_s == view.window_end_s == now_s
        for name in SIGNALS:
            assert without_detail(getattr(found[key], name)) == without_detail(getattr(view, name)), (key, name)


def test_a_sleeper_is_no_capacity_and_starts_anew_when_it_wakes() -> None:
    collector = VirtualCollector()
    for name in ("awake", "sleeper"):
        collector.add(name, "chat", Role.COLOCATED, 1)

    def scrape(now_s: int, *, asleep: bool) -> RoleSignals:
        collector.scrape(
            float(now_s),
            {
                "awake": reading(running=4.0, decoded=100.0 * now_s),
                "sleeper": reading(awake=0.0 if asleep else 1.0, running=7.0, decoded=5000.0),
            },
        )
        routable = {CHAT: ["awake"] if asleep else ["awake", "sleeper"]}
        return collector.signals(float(now_s), routable)[0][CHAT]

    for second in range(1, 9):
        view = scrape(second, asleep=True)
    assert (view.running.value, view.decode_tps.value, view.running.quality) == (4.0, 100.0, Quality.OK)
    view = scrape(9, asleep=False)
    assert (view.running.value, view.running.quality) == (11.0, Quality.WARMING)
    assert (view.decode_tps.value, view.decode_tps.reported, view.decode_tps.quality) == (100.0, 1, Quality.PARTIAL)
    assert not view.decode_tps.fit_for_release
    for second in range(10, 15):
        view = scrape(second, asleep=False)
    assert (view.decode_tps.value, view.decode_tps.reported, view.decode_tps.quality) == (100.0, 2, Quality.OK)


def test_the_front_door_tells_rates_and_its_last_word_of_what_is_held() -> None:
    collector = VirtualCollector()
    collector.add("chat-0", "chat", Role.COLOCATED, 1)
    routable = {CHAT: ["chat-0"]}
    for second in range(1, 8):
        collector.scrape(float(second), {"chat-0": reading(running=0.0, decoded=0.0)})
        collector.report(
            float(second), "chat", arrivals=second, prompt_tokens=10 * second, output_tokens=5, held=second
        )
    front = collector.signals(7.0, routable)[1]["chat"]
    assert (front.arrival_rps.value, front.arrival_prompt_tps.value, front.arrival_output_tps.value) == (5.0, 50.0, 5.0)
    assert (front.held.value, front.held.quality, front.window_end_s) == (7.0, Quality.OK, 7.0)
    for second in range(8, 12):
        collector.scrape(float(second), {"chat-0": reading(running=0.0, decoded=0.0)})
    silent = collector.signals(11.0, routable)[1]["chat"]
    assert (silent.held.value, silent.held.quality) == (None, Quality.MISSING)


def test_a_window_that_ends_after_its_scrape_is_not_shown_before_its_end() -> None:
    """Between scrape and end the window before it is the newest; what came after its end is not in it."""
    collector = VirtualCollector()
    collector.add("chat-0", "chat", Role.COLOCATED, 1)

    def at(now_s: float) -> tuple[float | None, float | None] | None:
        view = collector.signals(now_s, {CHAT: ["chat-0"]})[0].get(CHAT)
        return None if view is None else (view.window_end_s, view.decode_tps.value)

    for second in range(1, 9):
        collector.scrape(
            second - 0.2, {"chat-0": reading(running=1.0, decoded=10.0 * second * second)}, end_s=float(second)
        )
        seen = at(second - 0.1)
        assert seen is None if second == 1 else seen is not None and seen[0] == second - 1.0
    # From 6 s on a window has a scrape before its start: 10 · (n² - (n - 5)²) tokens in 5 s.
    assert at(7.9) == (7.0, pytest.approx(90.0)) == at(7.9)
    assert at(8.0) == at(8.9) == (8.0, pytest.approx(110.0))


def test_nothing_is_known_before_the_first_scrape_nor_of_a_server_that_left() -> None:
    collector = VirtualCollector()
    assert collector.signals(1.0, {CHAT: ["chat-0"]}) == ({}, {})
    collector.add("chat-0", "chat", Role.COLOCATED, 1)
    collector.scrape(1.0, {"chat-0": reading(running=2.0, decoded=1.0)})
    assert collector.signals(1.0, {CHAT: ["chat-0"]})[0][CHAT].running.value == 2.0
    collector.remove("chat-0")
    assert collector.signals(1.0, {CHAT: ["chat-0"]}) == ({}, {})
    collector.add("chat-1", "chat", Role.COLOCATED, 1)
    with pytest.raises(ValueError, match="chat-1 is there already"):
        collector.add("chat-1", "chat", Role.COLOCATED, 1)


def test_a_sleeping_server_shows_the_same_page_until_it_wakes() -> None:
    one = Jumped(packaged_profiles()["a100-8b-tp1"])
    one.submit(EngineRequest("a", 500, 40), 0.0)
    one.advance(0.2)
    awake = one.recorder.reading(0.2)
    one.advance(20.0)
    one.recorder.asleep = True
    frozen = one.recorder.reading(20.0)
    assert frozen.values[GAUGE_COLUMN[Gauge.AWAKE]] == 0
    assert (
        frozen.values[COUNTER_COLUMN[Counter.DECODE_TOKENS]] == 40 > awake.values[COUNTER_COLUMN[Counter.DECODE_TOKENS]]
    )
    assert one.recorder.reading(30.0) == frozen
    one.recorder.asleep = False
    one.submit(EngineRequest("b", 500, 10), 31.0)
    one.advance(40.0)
    woken = one.recorder.reading(40.0)
    assert woken.values[GAUGE_COLUMN[Gauge.AWAKE]] == 1
    assert woken.values[COUNTER_COLUMN[Counter.DECODE_TOKENS]] == 50
    assert woken.values[COUNTER_COLUMN[Counter.FINISHED]] == 2
