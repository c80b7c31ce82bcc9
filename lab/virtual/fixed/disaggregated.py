"""A service of prefill and decode replicas on virtual time.

A request is computed by the least loaded prefill replica, which makes its first token and holds its KV; the least
loaded decode replica fetches the KV over the link between the two, computes the last prompt token again, as vLLM's
NIXL connector does, and makes the tokens. Limits: transfers do not slow one another down; a decode replica reserves
no space before the KV is there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from lab.virtual.clock import EngineClock, engines_of
from lab.virtual.fixed.records import Records
from lab.virtual.fixed.routing import LeastLoaded
from lab.virtual.network import Place, link_between
from simulator.core.event_engine import EventEngine
from simulator.core.profile import Profile
from simulator.core.requests import EngineRequest, FinishedRequest
from simulator.core.timing import KvLink
from simulator.traces.model import TraceRequest


@dataclasses.dataclass(slots=True)
class Journey:
    """One request on its way through both stages."""

    request: TraceRequest
    prefill: int = -1
    first_token_s: float = math.nan
    """When the client got its first token; not a number before."""


class DisaggregatedFleet:
    """Prefill and decode replicas of one service."""

    def __init__(self, link: KvLink, *, prefill_sends_first_token: bool = True) -> None:
        """`prefill_sends_first_token`: the client gets its first token when prefill ends, as DistServe and SGLang do
        it; False: from the decode replica, as vLLM's proxy does.
        """
        self.records = Records()
        self.clock = EngineClock(self._finished)
        self.prefill = LeastLoaded()
        self.decode = LeastLoaded()
        self.transferred_bytes = 0.0
        self.transfer_s = 0.0
        self._link = link
        self._sends_first = prefill_sends_first_token
        self._places: list[Place] = []
        self._links: dict[tuple[Place, Place], KvLink] = {}
        self._journeys: dict[str, Journey] = {}
        self._sequence = 0

    def add_prefill(self, engine: EventEngine, place: Place | None = None) -> int:
        """A prefill replica that gets prompts from now on; its index."""
        return self._add(engine, place, self.prefill)

    def add_decode(self, engine: EventEngine, place: Place | None = None) -> int:
        """A decode replica that gets requests from now on; its index."""
        return self._add(engine, place, self.decode)

    def submit(self, request: TraceRequest, block_hashes: tuple[int, ...] = ()) -> None:
        """Take one request at its arrival; raises ValueError when there is no prefill replica.

        `block_hashes` name the prompt's full KV blocks, for prefill replicas that keep them.
        """
        self.clock.run_before(request.arrival_s)
        index = self.prefill.least()
        if index is None:
            raise ValueError(f"no prefill replica takes the request at {request.arrival_s:.3f} s")
        self._sequence += 1
        name = str(self._sequence)
        self._journeys[name] = Journey(request, index)
        prompt = EngineRequest(name, request.prompt_tokens, 1, block_hashes=block_hashes, hold_kv=True)
        self.clock.submit(index, prompt, request.arrival_s)
        self.prefill.change(index, 1)

    def run(self, requests: Iterable[TraceRequest]) -> Records:
        """Serve a trace to its end."""
        for request in requests:
            self.submit(request)
        self.clock.run_before(math.inf)
        return self.records

    def _add(self, engine: EventEngine, place: Place | None, router: LeastLoaded) -> int:
        index = self.clock.add(engine)
        router.add(index, engine.unfinished)
        self._places.append(place if place is not None else Place())
        return index

    def _finished(self, index: int, finished: FinishedRequest) -> None:
        journey = self._journeys[finished.request.request_id]
        if finished.request.hold_kv:
            self._hand_over(index, journey, finished)
            return
        self.decode.change(index, -1)
        del self._journeys[finished.request.request_id]
        if finished.first_token_s is None:
            self.records.aborted += 1
            return
        if not self._sends_first:
            journey.first_token_s = finished.first_token_s
        self._decoded(index, journey, finished)

    def _decoded(self, index: int, journey: Journey, finished: FinishedRequest) -> None:
        self.records.add_times(
            arrival_s=journey.request.arrival_s,
            first_token_s=journey.first_token_s,
            finished_s=finished.finished_s,
            prompt_tokens=journey.request.prompt_tokens,
            output_tokens=journey.request.output_tokens,
            replica=index,
            preemptions=finished.preemptions,
        )

    def _hand_over(self, index: int, journey: Journey, finished: FinishedRequest) -> None:
        now_s, name, request = finished.finished_s, finished.request.request_id, journey.request
        if self._sends_first:
            self.prefill.change(index, -1)
        journey.first_token_s = now_s
        tokens = request.output_tokens - 1 if self._sends_first else request.output_tokens
        target = self.decode.least()
        if target is None:
            raise ValueError(f"no decode replica takes request {name} at {now_s:.3f} s")
        if tokens < 1:
            self.clock.call_at(now_s, lambda at_s: self._release(index, name, at_s))
            del self._journeys[name]
            self.records.add(finished, index)
            return
        link = self._link_of(self._places[index], self._places[target])
        seconds = link.transfer_s(request.prompt_tokens)
        self.transfer_s += seconds
        self.transferred_bytes += request.prompt_tokens * link.kv_bytes_per_token
        self.clock.call_at(now_s + seconds, lambda at_s: self._release(index, name, at_s))
        prompt = request.prompt_tokens + 1 if self._sends_first else request.prompt_tokens
        self.clock.submit(target, EngineRequest(name, prompt, tokens, external_kv_s=seconds), now_s)
        self.decode.change(target, 1)

    def _release(self, index: int, name: str, at_s: float) -> None:
        if not self._sends_first:
            # A proxy counts the request on its prefill server until the decode server answers, a little later still.
            self.prefill.change(index, -1)
        self.clock.at(index, at_s).release_held(name, at_s)
        self.clock.touched(index)

    def _link_of(self, source: Place, target: Place) -> KvLink:
        link = self._links.get((source, target))
        if link is None:
            link = self._links[source, target] = link_between(self._link, source, target)
        return link


def disaggregated(
    prefill: Profile,
    decode: Profile,
    *,
    prefill_places: Sequence[Place],
    decode_places: Sequence[Place],
    prefill_sends_first_token: bool = True,
) -> DisaggregatedFleet:
    """A service with a replica at each place; the link is the prefill profile's."""
    fleet = DisaggregatedFleet(prefill.kv_link(), prefill_sends_first_token=prefill_sends_first_token)
    for engine, place in zip(engines_of(prefill, len(prefill_places)), prefill_places, strict=True):
        fleet.add_prefill(engine, place)
    for engine, place in zip(engines_of(decode, len(decode_places)), decode_places, strict=True):
        fleet.add_decode(engine, place)
    return fleet
