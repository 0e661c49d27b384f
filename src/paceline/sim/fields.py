# SPDX-License-Identifier: Apache-2.0
"""Plain data to frozen dataclasses and back, with every complaint naming the dotted field."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import types
import typing
from collections.abc import Hashable, Mapping
from typing import Any

import yaml

from paceline.core.config import ConfigError

_YAML_ERRORS = (yaml.YAMLError, ValueError, RecursionError)
"""What the YAML reader raises: ValueError for a date like 2026-13-45, RecursionError for lists nested too deep."""


class _Loader(yaml.SafeLoader):
    """YAML without its silent duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} cannot be a key", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} appears twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(text: str, origin: str) -> dict[str, Any]:
    """The mapping in ``text``. Raises `ConfigError` naming ``origin`` if it is not YAML or not a mapping."""
    try:
        data = yaml.load(text, _Loader)
    except _YAML_ERRORS as error:
        raise ConfigError(origin, f"is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(origin, "must be a mapping of field names")
    return data


def json_text(data: Any) -> str:
    """``data`` as JSON, null in the place of NaN and the infinities, which JSON does not have."""
    return json.dumps(_finite(data), indent=1, allow_nan=False)


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    return [_finite(value) for value in data] if isinstance(data, list | tuple) else data


class _Dumper(yaml.SafeDumper):
    """YAML with lists of single values on one line."""


def _represent_list(dumper: yaml.SafeDumper, data: list[Any]) -> yaml.SequenceNode:
    single = not any(isinstance(item, list | dict) for item in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=single)


_Dumper.add_representer(list, _represent_list)


def write_yaml(data: Mapping[str, Any]) -> str:
    """``data`` as YAML, fields in their order."""
    text: str = yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    return text


def parse_value(text: str) -> object:
    """A value given on a command line, read as YAML: ``12``, ``true``, ``null``, ``[1, 2]``, or a plain word."""
    try:
        return yaml.load(text, _Loader)
    except _YAML_ERRORS:
        return text


def set_path(raw: Mapping[str, Any], key: str, value: object) -> dict[str, Any]:
    """A copy of ``raw`` with the entry at dotted ``key`` set; missing mappings on the way are made."""
    head, dot, rest = key.partition(".")
    if not head or (dot and not rest):
        raise ConfigError(key or "--set", "is not a dotted field name")
    if not dot:
        return {**raw, head: value}
    below = raw.get(head)
    if below is not None and not isinstance(below, Mapping):
        raise ConfigError(head, f"has no field {rest!r}: it is a single value")
    try:
        return {**raw, head: set_path(below or {}, rest, value)}
    except ConfigError as error:
        raise ConfigError(f"{head}.{error.field}", error.problem) from None


def as_plain(value: Any) -> Any:
    """Dataclasses to dicts and tuples to lists, all the way down."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: as_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [as_plain(v) for v in value]
    return value


def build(cls: type, raw: object, path: str) -> Any:
    """An instance of dataclass ``cls`` from plain data at dotted ``path``. Unknown and ill-typed fields are refused."""
    if not isinstance(raw, Mapping):
        raise ConfigError(path or "scenario", f"must be a mapping of field names, got {raw!r}")
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls)}
    for key in raw:
        if key not in known:
            raise ConfigError(_join(path, str(key)), _unknown(str(key), list(known)))
    values = {
        key: None if value is None and known[key].default is None else convert(value, hints[key], _join(path, key))
        for key, value in raw.items()
    }
    for name, f in known.items():
        needed = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if needed and name not in values:
            raise ConfigError(_join(path, name), "is needed")
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(_indexed(error.field, path), error.problem) from None


def _indexed(field: str, path: str) -> str:
    """``field`` with the list indices of ``path``, which a dataclass that checks itself does not know."""
    bare = re.sub(r"\[\d+\]", "", path)
    return path + field[len(bare) :] if field == bare or field.startswith(f"{bare}.") else field


def has_path(cls: type, key: str) -> bool:
    """Whether dotted ``key`` names a field of the dataclass ``cls`` or of a dataclass in it."""
    head, dot, rest = key.partition(".")
    if head not in {f.name for f in dataclasses.fields(cls)}:
        return False
    hint = typing.get_type_hints(cls)[head]
    return not dot or (isinstance(hint, type) and dataclasses.is_dataclass(hint) and has_path(hint, rest))


def convert(value: object, hint: Any, path: str) -> object:
    """``value`` as the type of ``hint``. Raises `ConfigError` for ``path`` where it is another type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        rest = [a for a in args if a is not type(None)]
        return None if value is None and len(rest) < len(args) else convert(value, rest[0], path)
    if origin is typing.Literal:
        return _choice(value, args, path)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(path, f"must be a list, got {value!r}")
        return tuple(convert(v, args[0], f"{path}[{i}]") for i, v in enumerate(value))
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return build(hint, {} if value is None else value, path)
    return _scalar(value, hint, path)


def _scalar(value: object, hint: Any, path: str) -> object:
    if hint is float:
        if isinstance(value, int | float | str) and not isinstance(value, bool):  # YAML reads 1e-3 and inf as words
            try:
                return float(value)
            except (ValueError, OverflowError):
                pass
        raise ConfigError(path, f"must be a number, got {value!r}")
    if hint is int and (isinstance(value, bool) or not isinstance(value, int)):
        raise ConfigError(path, f"must be an integer, got {value!r}")
    if not isinstance(value, hint):
        names = {bool: "true or false", str: "text"}
        raise ConfigError(path, f"must be {names.get(hint, hint.__name__)}, got {value!r}")
    return value


def _choice(value: object, choices: tuple[Any, ...], path: str) -> object:
    if isinstance(value, bool):  # YAML reads a bare off and on as booleans
        value = "on" if value else "off"
    if value not in choices:
        raise ConfigError(path, f"must be one of {', '.join(map(str, choices))}, got {value!r}")
    return value


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _unknown(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
    return f"unknown field, {hint}"
