"""The gateway on virtual time for services of prefill and decode replicas.

A request is computed by the least loaded prefill replica, then handed to the least loaded decode replica, which fetches
its KV over the link between the two and sends the first token, as with the real gateway. It counts on its prefill
replica until the KV has arrived; the real gateway counts it a little longer, until the first token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gateway.core.routing import Stage, Ticket, TicketState
from lab.virtual.gateway import CLUSTER, OpenRequest, VirtualGateway
from lab.virtual.network import Place, link_between
from lab.virtual.servers import VirtualServer
from simulator.core.requests import EngineRequest, FinishedRequest
from simulator.core.timing import KvLink
from trimtab.domain.vocabulary import Role


class StagedGateway(VirtualGateway):
    """`places` has each node's place. Colocated replicas are served as by `VirtualGateway`."""

    def __init__(self, services: Sequence[str], places: Mapping[str, Place], *, on_empty: Callable[[], None]) -> None:
        """`on_empty` is called when the last request has left a hidden prefill replica."""
        super().__init__(services)
        self.transferred_tokens = 0
        self._places = places
        self._on_empty = on_empty
        self._computed_on: dict[int, tuple[Ticket, str]] = {}
        """Row of a request → its ticket on the prefill replica that holds its KV, and its name there."""

    def finished(self, finished: FinishedRequest) -> bool:
        """See the base class; a prompt that is computed goes on to a decode replica."""
        if not finished.request.hold_kv:
            return super().finished(finished)
        name, now_s = finished.request.request_id, finished.finished_s
        item = self._open.pop(name)
        self._computed_on[item.row] = (item.ticket, name)
        item.ticket = self._router.submit(item.request.service, Stage.DECODE, now_s=now_s, cluster=CLUSTER)
        self._send(item, now_s)
        return False

    def _send(self, item: OpenRequest, now_s: float) -> None:
        ticket = item.ticket
        if ticket.state is TicketState.HELD or ticket.target.role is Role.COLOCATED:
            super()._send(item, now_s)
            return
        server = self._server_of(ticket, now_s)
        prompt = item.request.prompt_tokens + item.sent
        if ticket.target.role is Role.PREFILL:
            name = f"{item.row}.{item.reissued}.prefill"
            self._open[name] = item
            self.servers.clock.submit(server.index, EngineRequest(name, prompt, 1, hold_kv=True), now_s)
            return
        computed, held = self._computed_on.pop(item.row)
        source = self.servers.by_name[computed.target.replica]
        seconds = self._link(source, server).transfer_s(prompt)
        self.transferred_tokens += prompt
        self.servers.clock.call_at(now_s + seconds, lambda at_s: self._fetched(source, computed, held, at_s))
        name = f"{item.row}.{item.reissued}.decode"
        self._open[name] = item
        tokens = item.request.output_tokens - item.sent
        self.servers.clock.submit(server.index, EngineRequest(name, prompt, tokens, external_kv_s=seconds), now_s)

    def _fetched(self, source: VirtualServer, ticket: Ticket, held: str, at_s: float) -> None:
        self.servers.clock.at(source.index, at_s).release_held(held, at_s)
        self.servers.clock.touched(source.index)
        self._router.finish(ticket)
        key = ticket.target.key
        if self._router.is_hidden(key) and not self._router.in_flight(key):
            self._on_empty()

    def _link(self, source: VirtualServer, target: VirtualServer) -> KvLink:
        places = self._places
        return link_between(source.profile.kv_link(), places[source.gpus[0].node], places[target.gpus[0].node])
