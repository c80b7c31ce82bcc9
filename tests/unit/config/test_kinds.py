"""The registry of resource kinds agrees with the public contract, and models with their messages."""

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError, create_model
from pydantic.fields import FieldInfo

from trimtab.api.policy.v1 import policy_pb2
from trimtab.config.fields import Spec
from trimtab.config.kinds import Metadata, Resource, ResourceKind, ResourceSet, one_of
from trimtab.config.resources import KINDS, POOL, SERVICE_POLICY, Pool, ServicePolicy, apply_order
from trimtab.config.specs import PoolSpec
from trimtab.store.message_codec import SchemaMismatch

PROTOCOL = policy_pb2.DESCRIPTOR.services_by_name["PolicyService"]
EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def test_every_kind_of_the_contract_has_one_entry() -> None:
    numbers = [kind.number for kind in KINDS]
    assert sorted(numbers) == sorted(number for number in policy_pb2.ResourceKind.values() if number)
    words = [word for kind in KINDS for word in kind.words]
    assert len(set(words)) == len(words)
    assert len({kind.collection for kind in KINDS}) == len(KINDS)


def test_kinds_are_stored_and_called_as_in_every_release() -> None:
    """A changed name would lose what is stored, or break a command that somebody wrote down."""
    assert [(kind.name, kind.collection, kind.missing) for kind in KINDS] == [
        ("ServicePolicy", "service-policies", "NO_SUCH_POLICY"),
        ("Pool", "pools", "NO_SUCH_POOL"),
    ]
    assert [kind.words for kind in KINDS] == [
        ("servicepolicy", "servicepolicies", "service", "services"),
        ("pool", "pools"),
    ]


@EVERY_KIND
def test_requests_and_answers_of_a_kind_have_the_fields_that_its_entry_says(kind: ResourceKind[Any, Any]) -> None:
    one = kind.message.DESCRIPTOR
    for holder in (
        kind.method("Apply").request,
        kind.method("Apply").response,
        kind.method("Get").response,
        policy_pb2.ResourceRevision,
    ):
        found = holder.DESCRIPTOR.fields_by_name[kind.field]
        assert (found.message_type, found.is_repeated) == (one, False)
    assert kind.many_in(kind.method("List").response) == kind.plural_field
    for verb, fields in (
        ("Apply", {"validate_only", "request_id"}),
        ("Get", {"name"}),
        ("List", {"page_size", "page_token"}),
        ("Delete", {"name", "etag"}),
    ):
        assert fields <= set(kind.method(verb).request.DESCRIPTOR.fields_by_name)  # type: ignore[arg-type]


@EVERY_KIND
def test_a_dry_run_takes_resources_of_every_kind_before_its_own(kind: ResourceKind[Any, Any]) -> None:
    request = kind.method("Apply").request
    assert all(other.many_in(request) is not None for other in KINDS)


@EVERY_KIND
def test_a_kind_s_model_and_message_have_the_same_fields(kind: ResourceKind[Any, Any]) -> None:
    """Making the codec compares them, parts of parts too: names, aliases, types, words of enums."""
    assert kind.codec.message_type is kind.message


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ({"colour": (str, "")}, "has no field colour"),
        ({"cluster": (int, 0)}, "cannot be trimtab.policy.v1.PoolSpec.cluster"),
        ({"sleep_level": (str, "")}, "cannot be trimtab.policy.v1.PoolSpec.sleep_level"),
    ],
)
def test_a_field_of_a_model_alone_or_of_another_type_is_refused(spec: dict[str, Any], complaint: str) -> None:
    other = create_model("OtherSpec", __base__=PoolSpec, **spec)
    model = create_model("Pool", __base__=Resource, spec=(other, ...))
    with pytest.raises(SchemaMismatch, match=complaint):
        _ = ResourceKind(model=model, message=policy_pb2.Pool, plural="Pools", missing="").codec


def test_a_field_of_a_message_alone_is_refused() -> None:
    poorer = create_model("PoorerSpec", __base__=Spec, cluster=(str, ""))
    model = create_model("Pool", __base__=Resource, spec=(poorer, ...))
    with pytest.raises(SchemaMismatch, match=r"PoolSpec\.rules has no field in PoorerSpec"):
        _ = ResourceKind(model=model, message=policy_pb2.Pool, plural="Pools", missing="").codec


@EVERY_KIND
def test_a_default_that_is_not_zero_can_be_told_from_a_zero(kind: ResourceKind[Any, Any]) -> None:
    """Without presence a zero is not sent: it would come out as the default."""
    lost = list(_lost_zeros(kind.message.DESCRIPTOR, kind.model, kind.name))
    assert not lost


def _lost_zeros(message: Any, model: Any, place: str) -> Iterator[str]:
    for at in message.fields:
        part = model.model_fields[at.name]
        inner = f"{place}.{at.name}"
        if at.message_type is not None and at.message_type.full_name != "google.protobuf.Timestamp":
            yield from _lost_zeros(at.message_type, _part(part.annotation), inner)
        plain = at.message_type is None and at.enum_type is None and not at.is_repeated
        # The zero of an enum is no member of it.
        alone = plain and not at.has_presence and not part.is_required()
        if alone and part.default != at.default_value and _takes(part, at.default_value):
            yield inner


def _takes(part: FieldInfo, value: object) -> bool:
    try:
        TypeAdapter(part.rebuild_annotation()).validate_python(value)
    except ValidationError:
        return False
    return True


def _part(annotation: Any) -> Any:
    if hasattr(annotation, "model_fields"):
        return annotation
    return next((found for part in getattr(annotation, "__args__", ()) if (found := _part(part))), None)


def test_names_to_choose_from_are_read_as_a_sentence() -> None:
    assert [one_of(names) for names in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a or b", "a, b or c"]


def _pool(name: str, cluster: str = "east") -> Pool:
    spec = {"cluster": cluster, "gpus": [{"node": "n", "gpuIndices": [0]}], "members": [{"service": "chat"}]}
    return POOL.validate({"metadata": {"name": name}, "spec": spec})


def test_of_two_resources_with_one_name_the_later_set_s_counts() -> None:
    stored = ResourceSet([_pool("one"), _pool("two")])
    both = stored.beside(ResourceSet([_pool("two", "west"), _pool("three")]))
    assert {name: pool.spec.cluster for name, pool in both.of(POOL).items()} == {
        "one": "east", "two": "west", "three": "east",
    }  # fmt: skip
    assert stored.of(POOL)["two"].spec.cluster == "east"
    assert both.of(SERVICE_POLICY) == {}


def test_what_others_refer_to_is_applied_first() -> None:
    policy = ServicePolicy.model_construct(metadata=Metadata(name="chat"))
    assert sorted([_pool("one"), policy, _pool("two")], key=apply_order)[0] is policy
