"""One type as JSON, there and back: the adapter that is made of it once, and what pydantic refuses in few words.

What pydantic itself would let pass is found by unstorable.py; here a type's schema says whether its values must be looked
through for that. When to look, and which error it is, say payload.py for arguments and result_codec.py for what a task returns.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from .unstorable import find_unstorable_json

# Core schemas whose values cannot be, or hold, what find_unstorable looks for. Others are looked through.
_QUIET = frozenset(
    "none bool int str bytes date time timedelta literal enum url multi-host-url uuid list tuple set "
    "frozenset dict nullable union tagged-union typed-dict typed-dict-field model model-fields model-field "
    "dataclass dataclass-args dataclass-field default definitions definition-ref json-or-python "
    "lax-or-strict chain".split()
)
# Instances of these are not validated: a model may have been changed, or made by model_construct().
_TAKEN_AS_THEY_ARE = frozenset({"model", "dataclass", "is-instance"})
# Of a schema that is one of these and nothing else, a value of exactly its type is read again as it was written.
_AS_WRITTEN = {"none": type(None), "bool": bool, "int": int, "str": str}
_PLAIN_INT = 2**63
_NO_SCHEMA = frozenset({"metadata", "serialization", "default", "config", "expected", "members", "computed_fields"})


class Codec:
    """One type: its adapter, and whether its values must be looked through."""

    __slots__ = ("_all", "_annotation", "_dump", "_look", "_validate", "_validate_json", "as_written", "must_reread")

    def __init__(self, annotation: Any) -> None:
        self._annotation = annotation
        self._all: Codec | None = None
        adapter: TypeAdapter[Any] = TypeAdapter(annotation)
        if not adapter.pydantic_complete:
            adapter.rebuild(force=True, raise_errors=True)
        types = _schema_types(adapter.core_schema)
        if "generator" in types:
            raise TypeError("an iterator can be read only once; use list[…] or Sequence[…]")
        self._look = not types <= _QUIET
        self.must_reread = bool(types & _TAKEN_AS_THEY_ARE)
        schema = adapter.core_schema
        self.as_written = _AS_WRITTEN.get(str(schema.get("type"))) if len(schema) == 1 else None
        # The adapter's own methods cost as much as what they call.
        self._validate = adapter.validator.validate_python
        self._validate_json = adapter.validator.validate_json
        self._dump = adapter.serializer.to_json

    def validate(self, value: object) -> Any:
        """Return the value as one of the type. Raises pydantic's ValidationError."""
        return self._validate(value, by_alias=True, by_name=True)

    def write(self, value: object) -> bytes:
        """Return the value as JSON, by name and without computed fields: what `read` takes, whatever aliases a model has."""
        return self._dump(value, by_alias=False, round_trip=True, warnings="error")

    @property
    def all(self) -> Codec:
        """The codec of a list of them."""
        if self._all is None:
            self._all = Codec(cast(Any, list)[self._annotation])
        return self._all

    def write_known(self, value: object) -> bytes:
        """Write what `write` is known to write without an error: that it may raise one costs more than all else."""
        return self._dump(value, by_alias=False, round_trip=True, warnings=False)

    def write_plain(self, value: object) -> str | None:
        """Write None, a bool or an int where nothing else is expected: as pydantic does, in a tenth of the time."""
        if type(value) is not self.as_written:
            return None
        if value is None:
            return "null"
        if isinstance(value, bool):
            return "true" if value else "false"
        return str(value) if isinstance(value, int) and -_PLAIN_INT < value < _PLAIN_INT else None

    def read(self, raw: str | bytes) -> Any:
        """Make the value of its JSON. Raises pydantic's ValidationError."""
        return self._validate_json(raw, by_alias=True, by_name=True)

    def refusal(self, raw: bytes, value: object, *, naive: bool, limit: int, read: bool = False) -> str | None:
        """Say why the value, whose JSON this is, cannot be stored, or None; the rest as in `find_unstorable_json`."""
        return find_unstorable_json(raw, value, look=self._look, naive=naive, limit=limit, read=read)


def _schema_types(schema: object) -> set[str]:
    """Collect the types of all schemas in a core schema; 'extra' stands for fields that are not declared."""
    types: set[str] = set()
    seen: list[object] = [schema]
    while seen:
        node = seen.pop()
        if isinstance(node, Mapping):
            if isinstance(node.get("type"), str):
                types.add(node["type"])
                seen.extend(part for key, part in node.items() if key not in _NO_SCHEMA)
                config = node.get("config")
                if node.get("extra_behavior") == "allow" or (
                    isinstance(config, Mapping) and config.get("extra_fields_behavior") == "allow"
                ):
                    types.add("extra")
            else:
                seen.extend(node.values())
        elif isinstance(node, (list, tuple)):
            seen.extend(node)
    return types


def explain(error: Exception, names: Collection[str] | None = None) -> str:
    """Shorten what pydantic says: field by field, without the values; `names` are the arguments there are."""
    if not isinstance(error, ValidationError):
        text = str(error)
        parts = re.findall(r"Expected `([^`]*)`[^[]*\[(?:field_name='([^']*)')?.*?input_type=([\w.]+)\]", text)
        if parts:
            return "; ".join(f"{name + ': ' if name else ''}expected {kind}, got {got}" for kind, name, got in parts[:5])
        return f"{type(error).__name__}: {text[:500]}"
    lines = []
    details = error.errors(include_url=False, include_context=False, include_input=False)
    for detail in details[:5]:
        where = ".".join(map(str, detail["loc"]))
        if names is not None and len(detail["loc"]) == 1 and detail["type"] == "missing":
            lines.append(f"argument {where!r} is missing")
        elif names is not None and len(detail["loc"]) == 1 and detail["type"] == "extra_forbidden":
            lines.append(unknown_argument(where, names))
        else:
            lines.append(f"{where}: {detail['msg']}" if where else detail["msg"])
    more = len(details) - len(lines)
    return "; ".join(lines) + (f"; and {more} more" if more else "")


def unknown_argument(name: str, names: Collection[str]) -> str:
    """Say that there is no such argument, and which one may be meant."""
    near = difflib.get_close_matches(name, names, n=1)
    return f"no argument is named {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
