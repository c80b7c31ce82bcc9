"""`trimtab apply`, `get`, `delete`, `pause`, `resume`: the resources that users write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import grpc
import typer
from rich.table import Table

from trimtab.api.policy.v1 import policy_pb2
from trimtab.cli.connect import PAGE_SIZE, Services, call, every_item, explain
from trimtab.cli.endpoints import endpoints_of
from trimtab.cli.output import console, print_json
from trimtab.cli_errors import CommandError
from trimtab.config.kinds import R, ResourceKind, one_of
from trimtab.config.resources import (
    KINDS,
    Resource,
    ResourceError,
    apply_order,
    kind_of,
    parse_document,
    to_document,
)
from trimtab.config.yamlfile import YamlError, dump_yaml_documents, parse_yaml_documents, read_bounded_text
from trimtab.rpc.errors import error_reason
from trimtab.views.text import MISSING

_KINDS: Mapping[str, ResourceKind[Any, Any]] = {word: kind for kind in KINDS for word in kind.words}
_KNOWN_KINDS = one_of([kind.words[0] for kind in KINDS])
KindArgument = Annotated[str, typer.Argument(metavar="KIND", help=_KNOWN_KINDS)]
NameArgument = Annotated[str, typer.Argument(metavar="NAME")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document.")]


def read_resources(paths: Sequence[Path]) -> list[Resource]:
    """Every resource of files and folders (*.yaml, *.yml), in the order of `KINDS`.

    Raises CommandError, also for a second resource of one kind and name: the later would replace the first.
    """
    return [resource for resource, _ in read_placed(paths)]


def read_placed(paths: Sequence[Path]) -> list[tuple[Resource, str]]:
    """`read_resources`, each with its file. Raises CommandError."""
    try:
        placed = parse_placed((str(file), read_bounded_text(file)) for file in _files(paths))
    except YamlError as error:
        raise CommandError(str(error)) from None
    if not placed:
        raise CommandError(f"no resource in {', '.join(str(path) for path in paths)}")
    return placed


def parse_placed(texts: Iterable[tuple[str, str]]) -> list[tuple[Resource, str]]:
    """The resources of (name, YAML text), each with the name of its text, in the order of `KINDS`.

    Raises YamlError, and CommandError for a resource that is wrong or given twice.
    """
    resources: list[Resource] = []
    places: dict[tuple[str, str], str] = {}
    for source, text in texts:
        documents = parse_yaml_documents(text, source=source)
        for position, document in enumerate(documents, 1):
            place = source if len(documents) == 1 else f"{source} (document {position})"
            try:
                resource = parse_document(document)
            except ResourceError as error:
                raise CommandError(f"{place}: {str(error).removeprefix(': ')}") from None
            first = places.setdefault((resource.kind, resource.name), place)
            if len(places) == len(resources):
                raise CommandError(
                    f"{place}: {resource.kind} {resource.name} is in {first} already; keep one, or give another name"
                )
            resources.append(resource)
    ordered = sorted(resources, key=apply_order)
    return [(resource, places[resource.kind, resource.name]) for resource in ordered]


def _files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted(item for item in path.iterdir() if item.suffix in (".yaml", ".yml"))
        else:
            files.append(path)
    return files


async def apply_resources(
    services: Services, resources: Sequence[Resource], *, validate_only: bool = False
) -> list[tuple[Resource, bool]]:
    """Applies in order; returns each as stored and whether it changed.

    With `validate_only` nothing is stored, and each is judged as if those before it were.
    """
    applied: list[tuple[Resource, bool]] = []
    await apply_into(applied, services, resources, validate_only=validate_only)
    return applied


async def apply_into(
    applied: list[tuple[Resource, bool]], services: Services, resources: Sequence[Resource], *, validate_only: bool
) -> None:
    """`apply_resources` into a list that the caller holds: after a refusal it has what came before."""
    for position, resource in enumerate(resources):
        kind = kind_of(resource)
        request = kind.method("Apply").request(validate_only=validate_only)
        getattr(request, kind.field).CopyFrom(kind.to_message(resource))
        for other in resources[:position] if validate_only else ():
            field = kind_of(other).many_in(request)
            if field is not None:
                getattr(request, field).append(kind_of(other).to_message(other))
        reply = await _method(services, kind, "Apply")(request)
        applied.append((kind.parse(getattr(reply, kind.field)), reply.changed))


def apply_command(
    context: typer.Context,
    files: Annotated[list[Path], typer.Option("-f", "--file", help="YAML file or folder; may be given again.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check only, each beside those before it; nothing is stored.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Create or replace ServicePolicies and Pools; stops at the first that is refused, and says which came before."""
    placed = read_placed(files)
    applied: list[tuple[Resource, bool]] = []

    async def work(services: Services) -> grpc.aio.AioRpcError | None:
        try:
            await apply_into(applied, services, [resource for resource, _ in placed], validate_only=dry_run)
        except grpc.aio.AioRpcError as error:
            return error
        return None

    refused = call(endpoints_of(context), work)
    if as_json and (applied or refused is None):
        print_json([to_document(resource) | {"changed": changed} for resource, changed in applied])
    for resource, changed in () if as_json else applied:
        state = ("would be applied" if dry_run else "applied") if changed else "unchanged"
        console.print(f"{resource.kind}/{resource.name} {state}", highlight=False)
    if refused is not None:
        raise CommandError(refusal(refused, *placed[len(applied)], first=not applied))


def refusal(error: grpc.aio.AioRpcError, resource: Resource, place: str, *, first: bool) -> str:
    """One line that names the resource and its file; of a service that is not there at all only that.

    `place` is empty for a resource of no file, `first` says that nothing was applied before it.
    """
    if first and error.code() == grpc.StatusCode.UNAVAILABLE and not error_reason(error):
        return explain(error)
    return f"{f'{place}: ' if place else ''}{resource.kind} {resource.name}: {explain(error)}"


def get_command(
    context: typer.Context,
    kind: KindArgument,
    name: Annotated[str, typer.Argument(metavar="[NAME]")] = "",
    as_json: JsonOption = False,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="As `apply -f` takes it.")] = False,
) -> None:
    """Show resources as they are stored."""
    if as_json and as_yaml:
        raise CommandError("give --json or --yaml, not both")
    known = kind_named(kind)
    resources = call(endpoints_of(context), lambda services: _fetch(services, known, name))
    documents = [to_document(resource) for resource in resources]
    if as_json:
        print_json(documents[0] if name else documents)
    elif as_yaml:
        print(dump_yaml_documents(documents), end="")
    else:
        console.print(_table(resources))


def delete_command(context: typer.Context, kind: KindArgument, name: NameArgument) -> None:
    """Delete a resource; its replicas stay as they are."""
    known = kind_named(kind)

    async def work(services: Services) -> None:
        await _method(services, known, "Delete")(known.method("Delete").request(name=name))

    call(endpoints_of(context), work)
    console.print(f"{name} deleted", highlight=False)


def pause_command(
    context: typer.Context,
    kind: KindArgument,
    name: NameArgument,
    reason: Annotated[str, typer.Option("--reason", help="Kept with the resource and shown in the status.")] = "",
) -> None:
    """Freeze a service or pool at its last desired state."""
    request = policy_pb2.PauseRequest(kind=kind_named(kind).number, name=name, reason=reason)
    call(endpoints_of(context), lambda services: services.policy.Pause(request))
    console.print(f"{name} paused", highlight=False)


def resume_command(context: typer.Context, kind: KindArgument, name: NameArgument) -> None:
    """Let the engine act again."""
    request = policy_pb2.ResumeRequest(kind=kind_named(kind).number, name=name)
    call(endpoints_of(context), lambda services: services.policy.Resume(request))
    console.print(f"{name} resumed", highlight=False)


def kind_named(word: str) -> ResourceKind[Any, Any]:
    """A kind as people write it. Raises CommandError."""
    try:
        return _KINDS[word.lower()]
    except KeyError:
        raise CommandError(f"unknown kind {word!r}: {_KNOWN_KINDS}") from None


def _method(services: Services, kind: ResourceKind[Any, Any], verb: Literal["Apply", "Get", "List", "Delete"]) -> Any:
    return getattr(services.policy, kind.method(verb).name)


async def _fetch(services: Services, kind: ResourceKind[R, Any], name: str) -> list[R]:
    if name:
        reply = await _method(services, kind, "Get")(kind.method("Get").request(name=name))
        return [kind.parse(getattr(reply, kind.field))]
    request = kind.method("List").request
    messages: list[Any] = await every_item(
        lambda token: _method(services, kind, "List")(request(page_size=PAGE_SIZE, page_token=token)),
        lambda page: getattr(page, kind.plural_field),
    )
    return [kind.parse(message) for message in messages]


def _table(resources: Sequence[Resource]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("kind", "name", "what", "revision", "paused"):
        table.add_column(title)
    for resource in resources:
        metadata = resource.metadata
        table.add_row(
            resource.kind,
            resource.name,
            resource.summary,
            str(metadata.revision),
            "yes" if metadata.paused else MISSING,
        )
    return table
