"""Settings of a service: flags over environment over a YAML file over defaults.

A service subclasses ``ServiceSettings``; its fields alone define what may be set. ``drain_grace_s`` is
``--drain-grace-s`` as a flag, ``TRIMTAB_DRAIN_GRACE_S`` in the environment and ``drain_grace_s`` in the file that
``--config`` (or ``TRIMTAB_CONFIG``) names. A list is comma separated, a mapping ``key=value,key=value``.

Unknown flags and file keys are refused. An unknown ``TRIMTAB_…`` variable is refused only when it looks like a
misspelt field: services share one environment, and Kubernetes adds variables of its own.
"""

import difflib
import re
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from trimtab import __version__
from trimtab.addresses import is_loopback, split_address
from trimtab.config.faults import describe, suggestion
from trimtab.config.yamlfile import YamlError, read_yaml_documents
from trimtab.errors import SettingsError
from trimtab.names import is_identifier

__all__ = [
    "ENV_PREFIX",
    "Address",
    "Name",
    "ServiceSettings",
    "SettingsError",
    "is_loopback",
    "load_settings",
    "split_address",
]

ENV_PREFIX = "TRIMTAB_"
_KUBERNETES_VARIABLE = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP)(_\w+)?)?)$")


def _checked_address(value: str) -> str:
    split_address(value)
    return value


def _checked_store_url(value: str) -> str:
    if not value.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError("starts with redis://, rediss:// or unix://")
    return value


Address = Annotated[str, AfterValidator(_checked_address)]


def _checked_name(value: str) -> str:
    if not is_identifier(value):
        raise ValueError(f"{value!r} is not a name of lower-case letters, digits and hyphens, at most 63")
    return value


Name = Annotated[str, AfterValidator(_checked_name)]
"""``host:port``; port 0 lets the system choose."""


class ServiceSettings(BaseModel):
    """Settings of every service. Subclasses add fields; every field needs a default or is required."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    listen: Address = Field("127.0.0.1:7000", description="gRPC address")
    metrics_listen: Address = Field("127.0.0.1:9000", description="address of /metrics (HTTP)")
    store_url: Annotated[str, AfterValidator(_checked_store_url)] = Field(
        "redis://127.0.0.1:7379/0", description="Redis or Valkey; a password never reaches a log"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is logged")
    log_json: bool | None = Field(None, description="JSON logs; default: when stderr is no terminal")
    reflection: bool = Field(True, description="serve gRPC reflection")
    insecure_listen: bool = Field(False, description="allow a reachable gRPC address without TLS")
    tls_cert_file: Path | None = Field(None, description="PEM certificate of this service")
    tls_key_file: Path | None = Field(None, description="PEM key of the certificate")
    tls_client_ca_file: Path | None = Field(None, description="PEM CA that callers' certificates must come from")
    tls_ca_file: Path | None = Field(None, description="PEM CA of the servers this service calls; turns TLS on")
    drain_grace_s: float = Field(5.0, ge=0, le=600, description="how long calls may end by themselves at a stop")

    @model_validator(mode="after")
    def _check_tls(self) -> "ServiceSettings":
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file belong together")
        if self.tls_client_ca_file is not None and self.tls_cert_file is None:
            raise ValueError("tls_client_ca_file needs tls_cert_file and tls_key_file")
        host, _ = split_address(self.listen)
        if self.tls_cert_file is None and not self.insecure_listen and not is_loopback(host):
            raise ValueError(
                f"listen {self.listen} is reachable from other machines: set tls_cert_file and tls_key_file, "
                "or insecure_listen"
            )
        return self


S = TypeVar("S", bound=BaseModel)


@dataclass(frozen=True, kw_only=True)
class _Given:
    """One value as it was found, with the place that an error names."""

    value: object
    place: str


def load_settings(cls: type[S], argv: Sequence[str], environ: Mapping[str, str]) -> S:
    """Settings of type ``cls`` from flags, environment and file.

    Raises ``SettingsError`` (one line). ``--help`` and ``--version`` print and raise ``SystemExit(0)``.
    """
    flags = _from_flags(cls, argv)
    variables = _from_environment(cls, environ)
    config = flags.pop("config", None) or variables.pop("config", None)
    given = _from_file(cls, Path(str(config.value))) if config is not None else {}
    given |= variables
    given |= flags
    try:
        return cls.model_validate({name: item.value for name, item in given.items()})
    except ValidationError as error:
        raise SettingsError(_first_error(error, given)) from None


def _first_error(error: ValidationError, given: Mapping[str, _Given]) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    message = describe(first)
    location = [str(part) for part in first["loc"]]
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if not location:
        return f"settings: {message}{more}"
    name = location[0]
    below = "".join(f"[{part}]" for part in location[1:])
    place = given[name].place if name in given else f"{_flag(name)} (or {_variable(name)})"
    return f"{place}{below}: {message}{more}"


def _from_flags(cls: type[BaseModel], argv: Sequence[str]) -> dict[str, _Given]:
    fields = {_flag(name): name for name in cls.model_fields} | {"--config": "config"}
    given: dict[str, _Given] = {}
    position = 0
    while position < len(argv):
        flag, has_value, value = argv[position].partition("=")
        position += 1
        if flag in ("--help", "-h"):
            sys.stdout.write(_help_table(cls) + "\n")
            raise SystemExit(0)
        if flag == "--version":
            sys.stdout.write(f"{__version__}\n")
            raise SystemExit(0)
        negated = flag.startswith("--no-") and flag not in fields
        name = fields.get("--" + flag[5:] if negated else flag)
        if name is None or (negated and not _is_bool(cls, name)):
            raise SettingsError(f"unknown flag {flag}{suggestion(flag, fields)}; --help lists them")
        if name in given:
            raise SettingsError(f"{flag} is given twice")
        if negated:
            if has_value:
                raise SettingsError(f"{flag} takes no value")
            value = "false"
        elif not has_value:
            if _is_bool(cls, name) and (position >= len(argv) or argv[position].startswith("--")):
                value = "true"
            elif position >= len(argv):
                raise SettingsError(f"{flag} needs a value")
            else:
                value = argv[position]
                position += 1
        given[name] = _Given(value=_split(cls, name, value, place=flag), place=flag)
    return given


def _from_environment(cls: type[BaseModel], environ: Mapping[str, str]) -> dict[str, _Given]:
    variables = {_variable(name): name for name in cls.model_fields} | {f"{ENV_PREFIX}CONFIG": "config"}
    given: dict[str, _Given] = {}
    for variable in sorted(environ):
        if not variable.startswith(ENV_PREFIX):
            continue
        name = variables.get(variable)
        if name is not None:
            given[name] = _Given(value=_split(cls, name, environ[variable], place=variable), place=variable)
        elif _KUBERNETES_VARIABLE.search(variable) is None:
            near = difflib.get_close_matches(variable, sorted(variables), n=1, cutoff=0.92)
            if near:
                raise SettingsError(f"unknown environment variable {variable}; did you mean {near[0]}?")
    return given


def _from_file(cls: type[BaseModel], path: Path) -> dict[str, _Given]:
    try:
        documents = read_yaml_documents(path)
    except YamlError as error:
        raise SettingsError(str(error)) from None
    if not documents:
        return {}
    document = documents[0]
    if len(documents) > 1 or not isinstance(document, dict):
        raise SettingsError(f"{path}: expected one mapping of settings")
    given: dict[str, _Given] = {}
    for key, value in document.items():
        if key not in cls.model_fields:
            raise SettingsError(f"{path}: unknown key {key!r}{suggestion(str(key), cls.model_fields)}")
        given[key] = _Given(value=value, place=f"{path}: {key}")
    return given


def _split(cls: type[BaseModel], name: str, text: str, *, place: str) -> object:
    """Text of a flag or variable → what pydantic expects of a list or mapping; anything else stays text."""
    if name == "config":
        return text
    container = _container(cls.model_fields[name].annotation)
    if container is None:
        return text
    items = [item.strip() for item in text.split(",") if item.strip()]
    if container is not dict:
        return items
    pairs: dict[str, str] = {}
    for item in items:
        key, separator, value = item.partition("=")
        if not separator or not key:
            raise SettingsError(f"{place}: {item!r} is not key=value")
        if key in pairs:
            raise SettingsError(f"{place}: key {key!r} is given twice")
        pairs[key] = value
    return pairs


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation alone."""
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def _container(annotation: Any) -> type | None:
    for member in _alternatives(annotation):
        origin = get_origin(member) or member
        if origin in (list, tuple, set, frozenset, dict, Sequence, Mapping):
            return dict if origin in (dict, Mapping) else list
    return None


def _is_bool(cls: type[BaseModel], name: str) -> bool:
    return name in cls.model_fields and bool in _alternatives(cls.model_fields[name].annotation)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(name: str) -> str:
    return ENV_PREFIX + name.upper()


def _help_table(cls: type[BaseModel]) -> str:
    rows = [("--config FILE", "", "YAML file with any of the settings below")]
    for name, field in cls.model_fields.items():
        required = field.is_required()
        default = "required" if required else str(field.get_default(call_default_factory=True))
        rows.append((_flag(name), "" if default in ("None", "") else default, field.description or ""))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"  {flag:<{widths[0]}}  {default:<{widths[1]}}  {text}".rstrip() for flag, default, text in rows]
    first = (cls.__doc__ or cls.__name__).strip().splitlines()[0]
    return "\n".join([first, "", "flag, default, meaning (environment: TRIMTAB_…; file: the names with _)", *lines])
