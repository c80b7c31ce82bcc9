"""Pairs of production's shell and the virtual world that do the same: both call one function of a core or the domain.

A pair is data: the modules of both sides, the functions that both have to call, and functions that were written twice
and must not come back. What a module calls is found in its syntax tree, by its imports.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One task that production and the lab both do.

    `production` and `lab` are files from the root; one of each side has to call each function of `shared`, which are
    dotted names. `gone` are (file, function): the file may be gone too.
    """

    name: str
    production: tuple[str, ...]
    lab: tuple[str, ...]
    shared: tuple[str, ...]
    gone: tuple[tuple[str, str], ...] = ()


_ENGINE = "services/policy_engine/shell"
PAIRS = (
    Pair(
        name="desired state of a pool",
        production=(f"{_ENGINE}/pools.py",),
        lab=("lab/virtual/pool_run.py",),
        shared=("policy_engine.core.pool.initial_layout.lay_out", "policy_engine.core.pool.desired.desired_pool"),
        gone=(
            (f"{_ENGINE}/poolstate.py", "desired_state"),
            ("lab/virtual/actuation.py", "pool_request"),
            ("lab/virtual/control.py", "specs_of"),
        ),
    ),
    Pair(
        name="awake set after a transition that came to nothing",
        production=(f"{_ENGINE}/publish.py",),
        lab=("lab/virtual/control.py",),
        shared=(
            "policy_engine.core.pool.transition_outcome.awake_after",
            "policy_engine.core.pool.transition_outcome.settled",
        ),
        gone=((f"{_ENGINE}/publish.py", "_awake_now"), ("lab/virtual/control.py", "awake_after")),
    ),
    Pair(
        name="scaling request",
        production=(f"{_ENGINE}/scaled.py",),
        lab=("lab/virtual/scaled_run.py",),
        shared=("policy_engine.core.scaled.scaling_request.scaling_request",),
    ),
    Pair(
        name="placements and inventory",
        production=(
            "services/actuator/shell/codec.py",
            "services/actuator/shell/servicer.py",
            "services/prescheduler/shell/clusters.py",
        ),
        lab=("lab/virtual/placing.py",),
        shared=(
            "actuator.core.placement_exchange.group_requests",
            "actuator.core.placement_exchange.node_columns",
            "prescheduler.core.inventory.cluster_inventory",
            "prescheduler.core.inventory.taken_away",
        ),
        gone=(
            ("services/actuator/shell/codec.py", "node_table"),
            ("services/prescheduler/shell/codec.py", "inventory"),
            ("lab/virtual/placing.py", "_group_request"),
        ),
    ),
    Pair(
        name="merging of windows",
        production=(f"{_ENGINE}/observe.py",),
        lab=("lab/virtual/observing.py",),
        shared=(
            "trimtab.domain.role_merge.merge",
            "trimtab.domain.role_signals.role_signals",
            "trimtab.domain.role_signals.front_door",
        ),
        gone=(("lab/virtual/observing.py", "_role_signals"), ("lab/virtual/observing.py", "_front_door")),
    ),
    Pair(
        name="cycle of a pool",
        production=(f"{_ENGINE}/pools.py", f"{_ENGINE}/publish.py"),
        lab=("lab/virtual/control.py",),
        shared=(
            "policy_engine.core.pool.cycle.pool_input",
            "policy_engine.core.pool.cycle.needs_counts",
            "policy_engine.core.pool.cycle.with_counts",
            "policy_engine.core.pool.cycle.next_desired",
            "policy_engine.core.pool.cycle.preemption",
            "policy_engine.core.pool.transition_outcome.under_way",
            "policy_engine.core.pool.transition_outcome.must_publish",
            "policy_engine.core.pool.transition_outcome.refused",
        ),
    ),
)


def twins(pairs: Sequence[Pair] = PAIRS, root: Path = ROOT) -> list[str]:
    """Pairs whose sides do not both call the functions that they share, each with what is amiss."""
    found = []
    for pair in pairs:
        faults = list(_faults(pair, root))
        if faults:
            found.append(f"{pair.name}: {'; '.join(faults)}")
    return found


def _faults(pair: Pair, root: Path) -> Iterator[str]:
    for side in (pair.production, pair.lab):
        missing = [name for name in side if not (root / name).is_file()]
        yield from (f"{name} is not there" for name in missing)
        called = {name for file in side if file not in missing for name in calls(_tree(root / file))}
        yield from (f"{' and '.join(side)}: no call of {name}" for name in pair.shared if name not in called)
    for file, function in pair.gone:
        if (root / file).is_file() and function in _functions(_tree(root / file)):
            yield f"{file} has {function} again"


def calls(tree: ast.AST) -> set[str]:
    """Dotted names of imported functions that are called, or given to a call as an argument."""
    imported = _imported(tree)
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for used in (node.func, *node.args, *(keyword.value for keyword in node.keywords)):
                name = _dotted(used, imported)
                if name:
                    found.add(name)
    return found


def _imported(tree: ast.AST) -> dict[str, str]:
    """Name in the module → what it is."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
            found |= {top: top for alias in node.names if not alias.asname for top in [alias.name.partition(".")[0]]}
    return found


def _dotted(node: ast.AST, imported: dict[str, str]) -> str:
    """The whole name of what an expression refers to; empty when that was not imported."""
    if isinstance(node, ast.Name):
        return imported.get(node.id, "")
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value, imported)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def _functions(tree: ast.AST) -> set[str]:
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes(), filename=str(path))
