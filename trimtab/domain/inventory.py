"""The nodes of one cluster as columns: the actuator lists them, the pre-scheduler builds its tree of them."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.api.actuator.v1 import actuator_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeColumns:
    """Row i of every column is node i.

    Bit i of `free_gpu_masks` is set when GPU i of the node can take a new scaled replica.
    """

    nodes: tuple[str, ...]
    vdcs: tuple[str, ...]
    s2s: tuple[str, ...]
    s1s: tuple[str, ...]
    gpu_types: tuple[str, ...]
    gpus: tuple[int, ...]
    free_gpu_masks: tuple[int, ...]


def columns_to_proto(columns: NodeColumns) -> actuator_pb2.NodeTable:
    """The message of these columns."""
    return actuator_pb2.NodeTable(
        nodes=columns.nodes,
        vdcs=columns.vdcs,
        s2s=columns.s2s,
        s1s=columns.s1s,
        gpu_types=columns.gpu_types,
        gpus=columns.gpus,
        free_gpu_masks=columns.free_gpu_masks,
    )


def columns_from_proto(table: actuator_pb2.NodeTable) -> NodeColumns:
    """The columns in a message, as they are: whether they agree with one another is for the reader to check."""
    return NodeColumns(
        nodes=tuple(table.nodes),
        vdcs=tuple(table.vdcs),
        s2s=tuple(table.s2s),
        s1s=tuple(table.s1s),
        gpu_types=tuple(table.gpu_types),
        gpus=tuple(table.gpus),
        free_gpu_masks=tuple(table.free_gpu_masks),
    )
