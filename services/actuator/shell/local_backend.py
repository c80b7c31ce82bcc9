"""The ``local`` backend: a fleet's admin API over HTTP.

Answers are parsed into models and bounded in size and time. A body that does not parse is an error of that call, never
a half-read list: a partial list would make replicas look gone.
"""

import json
from collections.abc import Mapping
from typing import TypeVar
from urllib.parse import quote

import aiohttp
import pydantic

from actuator.core.model import Gpu, PlacedSpec, Placement, Spec
from actuator.core.world import Listed, Node, RunState
from actuator.shell.backend import DECISION_LABEL, GROUP_LABEL, POOL_LABEL, BackendError, labels_of
from trimtab.domain.vocabulary import Role

MAX_BODY_BYTES = 64 * 2**20
_READ_TIMEOUT_S = 3.0
_WRITE_TIMEOUT_S = 15.0


class _Body(pydantic.BaseModel):
    """Keys that a newer fleet adds are not an error."""

    model_config = pydantic.ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class _NodeBody(_Body):
    node: str
    cluster: str = "local"
    vdc: str
    s2: str
    s1: str
    gpu_type: str
    gpus: int = pydantic.Field(ge=0, le=64)
    free_gpu_indices: list[int]


class _Nodes(_Body):
    nodes: list[_NodeBody]


class _ReplicaBody(_Body):
    replica: str
    service: str
    role: Role
    model: str
    address: str
    node: str
    gpu_indices: list[int]
    profile: str = ""
    state: RunState
    start_time: float | None = None
    labels: dict[str, str] = {}
    host_memory_gib: float | None = None


class _Replicas(_Body):
    replicas: list[_ReplicaBody]


class _GpuBody(_Body):
    node: str
    index: int
    memory_gib: float
    used_gib: float


class _Gpus(_Body):
    gpus: list[_GpuBody]


B = TypeVar("B", bound=_Body)


class LocalBackend:
    """One fleet."""

    measures_gpus = True
    gpu_memory_age_s = 0.0
    can_create = True

    def __init__(self, fleet_url: str, cluster: str) -> None:
        self._url = fleet_url.rstrip("/")
        self._cluster = cluster
        self._session: aiohttp.ClientSession | None = None

    async def list_nodes(self) -> Mapping[str, Node]:
        """Nodes of this cluster. What the fleet regards as taken includes sleepers."""
        body = await self._get("/nodes", _Nodes)
        return {
            node.node: Node(
                node=node.node,
                vdc=node.vdc,
                s2=node.s2,
                s1=node.s1,
                gpu_type=node.gpu_type,
                gpus=node.gpus,
                taken=frozenset(range(node.gpus)) - frozenset(node.free_gpu_indices),
            )
            for node in body.nodes
            if node.cluster == self._cluster
        }

    async def list_replicas(self) -> Mapping[str, Listed]:
        """All replicas."""
        body = await self._get("/replicas", _Replicas)
        return {item.replica: _listed(item) for item in body.replicas}

    async def create_replica(self, placed: PlacedSpec) -> None:
        """200 and 201 count as success; 400 is permanent. Raises ``BackendError`` for any other status."""
        spec = placed.spec
        body = {
            "replica": spec.replica,
            "service": spec.service,
            "role": spec.role.value,
            "model": spec.model,
            "node": placed.node,
            "gpu_indices": list(placed.placement.gpu_indices),
            "profile": spec.profile,
            "labels": labels_of(spec),
        }
        status, text = await self._call("POST", "/replicas", timeout_s=_WRITE_TIMEOUT_S, body=body)
        if status not in (200, 201):
            raise BackendError(_error_text(status, text), permanent=status == 400)

    async def delete_replica(self, replica: str) -> None:
        """404 counts as success. Raises ``BackendError`` for an error status."""
        path = f"/replicas/{quote(replica, safe='')}"
        status, text = await self._call("DELETE", path, timeout_s=_WRITE_TIMEOUT_S)
        if status not in (200, 204, 404):
            raise BackendError(_error_text(status, text))

    async def gpu_memory(self) -> Mapping[Gpu, tuple[float, float]]:
        """Memory as the fleet measures it."""
        body = await self._get("/gpus", _Gpus)
        return {(gpu.node, gpu.index): (gpu.used_gib, gpu.memory_gib) for gpu in body.gpus}

    def measured_nodes(self) -> frozenset[str] | None:
        """All."""
        return None

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()

    async def _get(self, path: str, body_type: type[B]) -> B:
        status, text = await self._call("GET", path, timeout_s=_READ_TIMEOUT_S)
        if status != 200:
            raise BackendError(f"GET {path}: {_error_text(status, text)}")
        try:
            return body_type.model_validate_json(text)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"]) or "body"
            raise BackendError(f"GET {path}: {place}: {first['msg']}") from error

    async def _call(
        self, method: str, path: str, *, timeout_s: float, body: Mapping[str, object] | None = None
    ) -> tuple[int, str]:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        try:
            async with self._session.request(
                method, self._url + path, json=body, timeout=aiohttp.ClientTimeout(total=timeout_s)
            ) as response:
                raw = await response.content.read(MAX_BODY_BYTES + 1)
                while len(raw) <= MAX_BODY_BYTES and not response.content.at_eof():
                    raw += await response.content.read(MAX_BODY_BYTES + 1 - len(raw))
                if len(raw) > MAX_BODY_BYTES:
                    raise BackendError(f"{method} {path}: the answer is larger than {MAX_BODY_BYTES} bytes")
                return response.status, raw.decode("utf-8", "replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise BackendError(f"{method} {self._url}{path}: {error or f'no answer within {timeout_s:g} s'}") from error


def _listed(item: _ReplicaBody) -> Listed:
    spec = Spec(
        replica=item.replica,
        service=item.service,
        role=item.role,
        model=item.model,
        profile=item.profile,
        pool=item.labels.get(POOL_LABEL, ""),
        group=item.labels.get(GROUP_LABEL, ""),
        decision_id=item.labels.get(DECISION_LABEL, ""),
    )
    return Listed(
        spec=spec,
        placement=Placement(node=item.node, gpu_indices=tuple(item.gpu_indices)),
        address=item.address.rstrip("/"),
        run_state=item.state,
        start_time_s=item.start_time or 0.0,
        host_memory_gib=item.host_memory_gib,
    )


def _error_text(status: int, text: str) -> str:
    try:
        body = json.loads(text)
        message = body.get("error") if isinstance(body, dict) else None
    except ValueError:
        message = None
    return f"{status}: {message or text[:200] or 'no text'}"
