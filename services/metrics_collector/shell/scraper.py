"""Scrapes every target on its own schedule, one request in flight each, so that no target waits for another.

No target has a task: a timer wheel starts what is due and gives up what is late, and the client calls back with each
page. ``core.schedule`` says when a target is due.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from time import monotonic

import structlog

from metrics_collector.core.gpu_table import GpuTable
from metrics_collector.core.liveness import LivenessReport, liveness_report
from metrics_collector.core.page import Hint, PageError, PageReader
from metrics_collector.core.schedule import next_due, phase, phase_s, rounds_to_skip, spread_of
from metrics_collector.core.schema import GAUGE_COLUMN
from metrics_collector.core.scrape_load import read_load
from metrics_collector.core.status import TargetStatus
from metrics_collector.core.table import SeriesTable
from metrics_collector.core.targets import Target
from metrics_collector.core.window_close import ClosedSlice
from metrics_collector.shell.answer import DownError, Failure
from metrics_collector.shell.client import ClientRules, TargetClient
from metrics_collector.shell.metrics import ScrapeMetrics
from metrics_collector.shell.request import Place
from metrics_collector.shell.settings import CollectorSettings
from metrics_collector.shell.timer_wheel import SLOT_S, TimerWheel
from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.domain.dialects.dcgm import GpuPageError, read_gpu_page
from trimtab.domain.signals import Gauge

log = structlog.get_logger(__name__)

_AWAKE = GAUGE_COLUMN[Gauge.AWAKE]
# /load is asked for after so many scrapes of a server that shows no movement; of one that has none, more rarely.
_LOAD_EVERY = 5
_LOAD_EVERY_WITHOUT = 60
_DEADLINE_SHARE = 0.1
_STATES_TOLD = (pb.TARGET_STATE_DOWN, pb.TARGET_STATE_BAD_PAGE, pb.TARGET_STATE_STUCK)


class Scraper:
    """Every target that has an address is scraped into ``table``. ``statuses`` holds what each has shown.

    ``version`` is another one whenever ``targets`` has changed. ``witnesses`` has what is known of servers beside
    their pages.
    """

    def __init__(
        self,
        settings: CollectorSettings,
        rules: Callable[[Target], ClientRules],
        reader: PageReader,
        metrics: ScrapeMetrics,
        *,
        now_s: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.reader = reader
        self.metrics = metrics
        self.now_s = now_s
        self._rules = rules
        self._wheel = TimerWheel()
        self.table = SeriesTable(rows=settings.ring_rows)
        self.gpus = GpuTable(keep_s=2 * settings.window_s_at(settings.longest_interval_s))
        self.witnesses: dict[str, LivenessReport] = {}
        self.version = 0
        self.hints: dict[str, Hint] = {}
        self._scrapes: dict[str, _Scrape] = {}
        self._spreads: dict[float, float] = {}
        self.targets: dict[str, Target] = {}
        self.statuses: dict[str, TargetStatus] = {}

    def update(self, targets: Mapping[str, Target]) -> None:
        """Scrape these targets from now on. One that is gone takes its samples with it; one whose address changed is
        another server, and starts anew."""
        self.version += 1
        self._spread(targets.values())
        for target_id in [target_id for target_id in self.targets if target_id not in targets]:
            self._stop(target_id)
        for target_id, target in targets.items():
            before = self.targets.get(target_id)
            if before is not None and before.address != target.address:
                self._stop(target_id)
            self.targets[target_id] = target
            self.statuses.setdefault(target_id, TargetStatus())
            if not target.exporter:
                interval_s = self.settings.interval_of(target.service)
                self.table.add(target_id, keep_s=self.settings.window_s_at(interval_s))
            if target.address:
                self._start(target_id, target, before)

    async def run(self, stopping: asyncio.Event) -> None:
        """Wait for the stop. A defect in a scrape ends the collector."""
        stop: asyncio.Future[object] = asyncio.ensure_future(stopping.wait())
        try:
            await asyncio.wait([stop, self._wheel.failure], return_when=asyncio.FIRST_COMPLETED)
            if self._wheel.failure.done():
                self._wheel.failure.result()
        finally:
            stop.cancel()
            for target_id in list(self.targets):
                self._stop(target_id)
            self._wheel.close()

    def _start(self, target_id: str, target: Target, before: Target | None) -> None:
        interval_s = self.settings.interval_of(target.service)
        scrape = self._scrapes.get(target_id)
        if scrape is not None and before is not None and before.service == target.service:
            return
        if scrape is not None:
            scrape.close()
        try:
            place = Place(target.address)
        except ValueError as error:
            self.statuses[target_id].failed(pb.TARGET_STATE_DOWN, str(error), duration_s=0.0)
            return
        self._scrapes[target_id] = _Scrape(
            self,
            self._wheel,
            target_id,
            place,
            self._rules(target),
            interval_s=interval_s,
            timeout_s=self.settings.timeout_of(target.service),
        )

    def _spread(self, targets: Iterable[Target]) -> None:
        """The scrapes of one interval share its last part, as much of it as their number needs."""
        numbers = Counter(self.settings.interval_of(target.service) for target in targets if target.address)
        self._spreads = {each_s: spread_of(number, interval_s=each_s) for each_s, number in numbers.items()}

    def spread(self, interval_s: float) -> float:
        """The part of an interval over which its scrapes are spread."""
        return self._spreads[interval_s]

    def _stop(self, target_id: str) -> None:
        scrape = self._scrapes.pop(target_id, None)
        if scrape is not None:
            scrape.close()
        target = self.targets.pop(target_id, None)
        if target is not None and target.exporter:
            self.gpus.remove(target.node)
        self.statuses.pop(target_id, None)
        self.witnesses.pop(target_id, None)
        self.table.remove(target_id)

    def judge(self, closed: ClosedSlice) -> None:
        """Take the verdicts of a closed window on its targets."""
        statuses, verdicts = self.statuses, closed.verdicts
        states, still = verdicts.states.tolist(), closed.still.tolist()
        for position, target_id in enumerate(closed.expected_replicas.target_ids):
            status = statuses.get(target_id)
            if status is None:
                # It left while the round was worked.
                continue
            status.still = still[position]
            reason = verdicts.reasons.get(position, "")
            if status.verdict != states[position] or status.reason != reason:
                before = status.state
                status.judged(states[position], reason)
                self.tell(target_id, before, status)

    def tell(self, target_id: str, before: "pb.TargetState.ValueType", status: TargetStatus) -> None:
        """Log a change of state that an operator may have to look at."""
        state = status.state
        if state != before and (state in _STATES_TOLD or before in _STATES_TOLD):
            log.info(
                "target changed",
                target=target_id,
                address=self.targets[target_id].address,
                state=pb.TargetState.Name(state),
                error=status.last_error or None,
            )


class _Scrape:
    """The scrapes of one target, one after the other."""

    __slots__ = (
        "_begin",
        "_client",
        "_closed",
        "_coarse",
        "_due_s",
        "_exporter_of",
        "_give_up",
        "_hint",
        "_interval_s",
        "_scraper",
        "_service",
        "_started_s",
        "_status",
        "_target_id",
        "_timeout_s",
        "_until_load",
        "_wheel",
    )

    def __init__(
        self,
        scraper: Scraper,
        wheel: TimerWheel,
        target_id: str,
        place: Place,
        rules: ClientRules,
        *,
        interval_s: float,
        timeout_s: float,
    ) -> None:
        self._scraper = scraper
        self._wheel = wheel
        self._target_id = target_id
        target = scraper.targets[target_id]
        self._service = target.service
        self._exporter_of = target.node if target.exporter else None
        self._status = scraper.statuses[target_id]
        self._hint: Hint | None = None
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._closed = False
        self._due_s = self._started_s = 0.0
        # Spread: a fleet that falls idle is not asked all at once.
        self._until_load = 1 + int(phase(target_id) * _LOAD_EVERY_WITHOUT)
        self._client = TargetClient(place, rules, answered=self._answered, failed=self._failed)
        # Hardly any scrape comes to its deadline: those of many are looked at together.
        self._coarse = max(1, int(timeout_s * _DEADLINE_SHARE / SLOT_S))
        # Bound once: they are handed to the wheel with every scrape.
        self._begin = self._on_due
        self._give_up = self._on_deadline
        self._plan(skip=0)

    def close(self) -> None:
        """No more scrapes, and nothing of the one under way."""
        self._closed = True
        self._client.close()

    def _plan(self, *, skip: int) -> None:
        now_s = self._scraper.now_s()
        after_s = now_s
        if now_s < self._due_s < now_s + self._interval_s / 2:
            # The store's clock was set back a little: what was due has been done.
            after_s = self._due_s + 0.01 * self._interval_s
        spread = self._scraper.spread(self._interval_s)
        behind_s = phase_s(self._target_id, spread=spread, interval_s=self._interval_s)
        self._due_s = next_due(after_s + skip * self._interval_s, phase_s=behind_s, interval_s=self._interval_s)
        self._wheel.call_in(self._due_s - now_s, self._begin)

    def _on_due(self) -> None:
        if self._closed:
            return
        now_s = self._scraper.now_s()
        self._scraper.metrics.lateness.observe(max(0.0, now_s - self._due_s))
        self._started_s = monotonic()
        self._wheel.call_in(self._timeout_s, self._give_up, slots=self._coarse)
        self._client.fetch()

    def _on_deadline(self) -> None:
        if not self._client.busy:
            return
        left_s = self._started_s + self._timeout_s - monotonic()
        if left_s > 0:
            # It was set for an earlier scrape, which ended in time.
            self._wheel.call_in(left_s, self._give_up, slots=self._coarse)
        else:
            self._client.expire(self._timeout_s)

    def _answered(self, page: bytes) -> None:
        if monotonic() - self._started_s > self._timeout_s:
            # This process stood still, and finds the page and its deadline at once: when the page was made is unknown.
            self._failed(DownError(f"its page was read later than {self._timeout_s:g} s"))
            return
        try:
            if self._exporter_of is None:
                self._take(page)
            else:
                self._take_gpus(page, self._exporter_of)
        except Exception as error:  # noqa: BLE001
            # A loop swallows what its callbacks raise; a defect is to end the collector.
            self._wheel.fail(error)

    def _take(self, page: bytes) -> None:
        scraper, status = self._scraper, self._status
        duration_s = monotonic() - self._started_s
        before = status.state
        try:
            # A first page is most likely laid out as another one of its service: learning a layout is dear.
            reading, hint = scraper.reader.read(page, self._hint or scraper.hints.get(self._service))
        except PageError as error:
            status.failed(pb.TARGET_STATE_BAD_PAGE, str(error), duration_s=duration_s)
        else:
            if hint is not self._hint:
                self._hint = scraper.hints[self._service] = hint
                self._client.speak(hint.dialect)
            # The server made the page at some moment of the request: its middle is off by least.
            at_s = scraper.now_s() - duration_s / 2
            scraper.table.put(self._target_id, reading, at_s=at_s)
            if reading.rejected:
                scraper.metrics.rejected.inc(reading.rejected)
            status.succeeded(
                at_s=at_s, duration_s=duration_s, rejected=reading.rejected, asleep=reading.values[_AWAKE] == 0
            )
        self._settle(before)

    def _take_gpus(self, page: bytes, node: str) -> None:
        scraper, status = self._scraper, self._status
        duration_s = monotonic() - self._started_s
        before = status.state
        try:
            reading = read_gpu_page(page)
        except GpuPageError as error:
            status.failed(pb.TARGET_STATE_BAD_PAGE, str(error), duration_s=duration_s)
        else:
            at_s = scraper.now_s() - duration_s / 2
            scraper.gpus.put(node, reading, at_s=at_s)
            status.succeeded(at_s=at_s, duration_s=duration_s, rejected=reading.rejected, asleep=False)
        self._settle(before)

    def _failed(self, error: Failure) -> None:
        before = self._status.state
        state = pb.TARGET_STATE_DOWN if isinstance(error, DownError) else pb.TARGET_STATE_BAD_PAGE
        self._status.failed(state, str(error), duration_s=monotonic() - self._started_s)
        self._settle(before)

    def _settle(self, before: "pb.TargetState.ValueType") -> None:
        scraper, status = self._scraper, self._status
        state = status.state
        scraper.metrics.scrapes[state].inc()
        if state != before:
            scraper.tell(self._target_id, before, status)
        failures = status.consecutive_failures
        self._plan(
            skip=rounds_to_skip(failures, interval_s=self._interval_s, max_backoff_s=scraper.settings.max_backoff_s)
            if failures
            else 0
        )
        if status.still and not failures:
            # Requests that wait at a sleeper are demand that no other signal shows.
            asleep = state == pb.TARGET_STATE_ASLEEP
            self._until_load -= _LOAD_EVERY_WITHOUT // _LOAD_EVERY if asleep else 1
            if self._until_load <= 0:
                self._client.fetch_load(self._loaded)

    def _loaded(self, body: bytes | None) -> None:
        load = read_load(body)
        self._until_load = _LOAD_EVERY_WITHOUT if load is None else _LOAD_EVERY
        witnesses, target_id = self._scraper.witnesses, self._target_id
        if load is None:
            witnesses.pop(target_id, None)
        else:
            witnesses[target_id] = liveness_report(
                witnesses.get(target_id), load=load, in_flight=None, answered=0, now_s=self._scraper.now_s()
            )
