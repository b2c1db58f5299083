"""Payloads and results as JSON: adapters made once from a task's signature, and what they refuse.

A payload is refused at enqueue, in the caller's stack, if the worker could not read it back as it was given;
a result likewise before it is stored. What pydantic itself would let pass is found by unstorable.py.
"""

from __future__ import annotations

import difflib
import inspect
import re
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NotRequired, Required, TypeVar, cast

from pydantic import AliasChoices, AliasPath, BaseModel, ConfigDict, RootModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import from_json, to_json
from typing_extensions import TypedDict

from .errors import InvalidPayload, InvalidResult, TaskDefinitionError
from .unstorable import find_unstorable, find_unstorable_json, is_surely_read

__all__ = ["PayloadCodec", "ResultCodec", "check_json", "find_unstorable", "read_signature"]

# Core schemas whose values cannot be, or hold, what find_unstorable looks for. Others are looked through.
_QUIET = frozenset(
    "none bool int str bytes date time timedelta literal enum url multi-host-url uuid list tuple set "
    "frozenset dict nullable union tagged-union typed-dict typed-dict-field model model-fields model-field "
    "dataclass dataclass-args dataclass-field default definitions definition-ref json-or-python "
    "lax-or-strict chain".split()
)
# Instances of these are not validated: a model may have been changed, or made by model_construct().
_TAKEN_AS_THEY_ARE = frozenset({"model", "dataclass", "is-instance"})
PLAIN_TYPES: frozenset[type] = frozenset({type(None), bool, int, float, str, bytes, list, dict, tuple})
"""Values of exactly these are no awaitables and no iterators; asking any other way costs more."""
# Of a schema that is one of these and nothing else, a value of exactly its type is read again as it was written.
_AS_WRITTEN = {"none": type(None), "bool": bool, "int": int, "str": str}
_PLAIN_INT = 2**63
TOGETHER = 100
"""Payloads that are looked at together: what is made of more to that end would call the garbage collector."""
_NO_SCHEMA = frozenset({"metadata", "serialization", "default", "config", "expected", "members", "computed_fields"})


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


class _Codec:
    """One type: its adapter, and whether its values must be looked through."""

    __slots__ = ("_all", "_annotation", "_dump", "_look", "_validate", "_validate_json", "as_written", "must_reread")

    def __init__(self, annotation: Any) -> None:
        self._annotation = annotation
        self._all: _Codec | None = None
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
        return self._validate(value, by_alias=True, by_name=True)

    def write(self, value: object) -> bytes:
        # By name and without computed fields: exactly what reading takes, whatever aliases a model has.
        return self._dump(value, by_alias=False, round_trip=True, warnings="error")

    @property
    def all(self) -> _Codec:
        """The codec of a list of them."""
        if self._all is None:
            self._all = _Codec(cast(Any, list)[self._annotation])
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
        return self._validate_json(raw, by_alias=True, by_name=True)

    def refusal(self, raw: bytes, value: object, *, naive: bool, limit: int, read: bool = False) -> str | None:
        return find_unstorable_json(raw, value, look=self._look, naive=naive, limit=limit, read=read)


def _explain(error: Exception, names: Collection[str] | None = None) -> str:
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
            lines.append(_unknown(where, names))
        else:
            lines.append(f"{where}: {detail['msg']}" if where else detail["msg"])
    more = len(details) - len(lines)
    return "; ".join(lines) + (f"; and {more} more" if more else "")


def _unknown(name: str, names: Collection[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"no argument is named {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def read_signature(fn: Callable[..., Any], *, task: str) -> tuple[list[inspect.Parameter], object]:
    """Return a task's parameters, annotations resolved, and its return annotation (`Any` where it has none).

    Raises TaskDefinitionError for annotations that cannot be resolved, `*args`, `**kwargs`, parameters
    without annotation and type variables.
    """
    try:
        hints = typing.get_type_hints(fn, include_extras=True)
        parameters = list(inspect.signature(fn).parameters.values())
    except Exception as error:
        raise TaskDefinitionError(
            f"task {task!r}: its annotations cannot be resolved ({type(error).__name__}: {error}); "
            "names in annotations must be known at module level, above the task"
        ) from error
    result = []
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
            raise TaskDefinitionError(
                f"task {task!r}: {stars}{parameter.name} has no fixed payload; name each parameter, or take one list or dict"
            )
        if parameter.name not in hints:
            raise TaskDefinitionError(
                f"task {task!r}: parameter {parameter.name!r} has no annotation; the payload is made from annotations"
            )
        annotation = hints[parameter.name]
        if isinstance(annotation, TypeVar):
            raise TaskDefinitionError(
                f"task {task!r}: parameter {parameter.name!r} is a type variable; a payload needs a definite type"
            )
        if isinstance(parameter.default, FieldInfo):
            raise TaskDefinitionError(
                f"task {task!r}: the default of {parameter.name!r} is pydantic's Field(); write Annotated[…, Field(…)]"
            )
        result.append(parameter.replace(annotation=annotation))
    return result, hints.get("return", Any)


class PayloadCodec:
    """A task's arguments as JSON: a single model is the payload itself, otherwise each argument is a key."""

    __slots__ = ("_codec", "_default", "_model", "_names", "_positional", "_task", "_wrapped")

    def __init__(self, parameters: list[inspect.Parameter], *, task: str) -> None:
        for parameter in parameters:
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise TaskDefinitionError(
                    f"task {task!r}: parameter {parameter.name!r} is positional-only; a payload is stored by name, drop the '/'"
                )
        self._task = task
        self._names = tuple(parameter.name for parameter in parameters)
        self._positional = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        self._model: str | None = None
        self._wrapped = False
        """Whether a model could be given under the name of its parameter by mistake, as those of other tasks are."""
        self._default: object = inspect.Parameter.empty
        if len(parameters) == 1 and _is_model(parameters[0].annotation):
            self._model = parameters[0].name
            self._default = parameters[0].default
            shape: object = parameters[0].annotation
        else:
            shape = _typed_dict(parameters)
        try:
            self._codec = _Codec(shape)
            self._wrapped = self._model is not None and _may_be_wrapped(self._model, parameters[0].annotation)
        except Exception as error:
            raise TaskDefinitionError(f"task {task!r}: {_blame(parameters, error)}") from error

    @classmethod
    def of(cls, fn: Callable[..., Any], *, skip_first: bool, task: str) -> PayloadCodec:
        """Make a task's codec, without its context if `skip_first`. Raises TaskDefinitionError."""
        parameters, _ = read_signature(fn, task=task)
        return cls(parameters[1:] if skip_first else parameters, task=task)

    def dump(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, limit: int) -> str:
        """Validate a call's arguments, return them as JSON (`limit` is in bytes). Raises InvalidPayload."""
        if len(args) > len(self._positional):
            raise InvalidPayload(self._task, f"takes {len(self._positional)} positional arguments, {len(args)} were given")
        values: dict[str, Any] = dict(zip(self._positional, args, strict=False))
        for name in kwargs:
            if name in values:
                raise InvalidPayload(self._task, f"argument {name!r} is given twice")
        values.update(kwargs)
        if self._model is None:
            return self._dump(values, limit)
        for name in values:
            if name != self._model:
                raise InvalidPayload(self._task, _unknown(name, self._names))
        value = values.get(self._model, self._default)
        if value is inspect.Parameter.empty:
            raise InvalidPayload(self._task, f"argument {self._model!r} is missing")
        return self._dump(value, limit)

    def dump_value(self, payload: Mapping[str, Any] | BaseModel, *, limit: int) -> str:
        """Do the same for a payload in one piece: the model, or a mapping with the payload's keys."""
        return self._dump(dict(payload) if isinstance(payload, Mapping) else payload, limit)

    def dump_values(self, values: Sequence[object], *, limit: int) -> list[str] | None:
        """Do the same for many in one piece, models or mappings: with one look at many of them where one finds nothing wrong.

        None: something may be, and each is to be looked at by itself.
        """
        dumped: list[str] = []
        for start in range(0, len(values), TOGETHER):
            some = self._dump_together(values[start : start + TOGETHER], limit)
            if some is None:
                return None
            dumped += [raw.decode() for raw in some]
        return dumped

    def _dump_together(self, values: Sequence[object], limit: int) -> list[bytes] | None:
        codec = self._codec.all
        try:
            mappings = {kind for kind in set(map(type, values)) if issubclass(kind, Mapping)}
            if mappings and self._wrapped:
                for value in values:
                    self._check_unwrapped(value)
            if mappings - {dict}:
                values = [dict(value) if isinstance(value, Mapping) else value for value in values]
            valid = codec.validate(values)
            together = codec.write(valid)
            if codec.must_reread:
                codec.read(together)
            each = [self._codec.write_known(value) for value in valid]
        except Exception:
            return None
        longest = max(map(len, each))
        read = codec.must_reread or is_surely_read(together, number=len(each), longest=longest)
        wrong = longest > limit or codec.refusal(together, valid, naive=True, limit=len(together), read=read) is not None
        return None if wrong else each

    def load(self, raw: str | bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Read a stored payload as arguments for a call. Raises InvalidPayload."""
        try:
            if self._wrapped and f'"{self._model}"' in (raw if isinstance(raw, str) else raw.decode()):
                self._check_unwrapped(from_json(raw))
            value = self._codec.read(raw)
        except InvalidPayload:
            raise
        except Exception as error:
            raise self._refused(error) from _shown(error)
        return (), value if self._model is None else {self._model: value}

    def _dump(self, value: object, limit: int) -> str:
        self._check_unwrapped(value)
        try:
            value = self._codec.validate(value)
            raw = self._codec.write(value)
            refusal = self._codec.refusal(raw, value, naive=True, limit=limit)
            if refusal is None and self._codec.must_reread:
                self._codec.read(raw)
        except Exception as error:
            raise self._refused(error) from _shown(error)
        if refusal is not None:
            raise InvalidPayload(self._task, refusal)
        return raw.decode()

    def _refused(self, error: Exception) -> InvalidPayload:
        return InvalidPayload(self._task, _explain(error, self._names if self._model is None else None))

    def _check_unwrapped(self, value: object) -> None:
        """Raise InvalidPayload for a model under the name of its parameter, which one with defaults would take for nothing."""
        if (
            self._wrapped
            and isinstance(value, Mapping)
            and set(value) == {self._model}
            and isinstance(value[self._model], Mapping)
        ):
            raise InvalidPayload(self._task, f"this task takes the model itself: leave out {self._model!r} around it")


def _may_be_wrapped(name: str, model: type[BaseModel]) -> bool:
    """Whether the name of its parameter means nothing to a model."""
    known = [one for field, of in model.model_fields.items() for one in (field, of.alias, of.validation_alias)]
    free = any(isinstance(one, AliasPath | AliasChoices) for one in known)  # these may name anything
    return not (free or name in known or model.model_config.get("extra") == "allow" or issubclass(model, RootModel))


def _shown(error: Exception) -> Exception | None:
    """Return what the traceback is to show above the refusal: of pydantic's own, whose `__context__` stays, nothing."""
    return None if isinstance(error, ValidationError) else error


def _is_model(annotation: object) -> bool:
    return inspect.isclass(annotation) and issubclass(annotation, BaseModel)


def _typed_dict(parameters: list[inspect.Parameter]) -> object:
    keys = {p.name: Required[p.annotation] if p.default is p.empty else NotRequired[p.annotation] for p in parameters}
    shape = cast(Any, TypedDict)("Payload", keys)
    shape.__pydantic_config__ = ConfigDict(extra="forbid")
    return cast(object, shape)


def _blame(parameters: list[inspect.Parameter], error: Exception) -> str:
    """Name the parameter whose annotation pydantic refuses."""
    for parameter in parameters:
        try:
            _Codec(parameter.annotation)
        except Exception as reason:
            text = str(reason).partition("\n")[0]
            return f"the annotation of parameter {parameter.name!r} cannot be a payload: {text}"
    return f"no payload can be made from its parameters: {str(error).partition(chr(10))[0]}"


class ResultCodec:
    """A task's return value as JSON, and back."""

    __slots__ = ("_codec", "_task")

    def __init__(self, annotation: object, *, task: str) -> None:
        self._task = task
        try:
            self._codec = _Codec(annotation)
        except Exception as error:
            text = str(error).partition("\n")[0]
            raise TaskDefinitionError(f"task {task!r}: its return annotation cannot be a result: {text}") from error

    @classmethod
    def of(cls, fn: Callable[..., Any], *, task: str) -> ResultCodec:
        """Make the codec of a task's return annotation, `Any` by default. Raises TaskDefinitionError."""
        return cls(read_signature(fn, task=task)[1], task=task)

    def dump(self, value: object, *, limit: int) -> str:
        """Return the value as JSON of at most `limit` bytes.

        It is sure to be read again as the task's return type: a value of another type is refused, not
        converted. Raises InvalidResult.
        """
        if type(value) not in PLAIN_TYPES and isinstance(value, (Awaitable, Iterator, AsyncIterator)):
            if inspect.iscoroutine(value):
                value.close()  # or else Python warns that it was never awaited
            raise InvalidResult(self._task, f"expected a value, got a {type(value).__name__}; await it or make a list")
        plain = self._codec.write_plain(value)
        if plain is not None and len(plain) <= limit:
            return plain
        try:
            raw = self._codec.write(value)
            refusal = self._codec.refusal(raw, value, naive=False, limit=limit)
            # What pydantic writes without a warning may still be of another type: None, Literal.
            if refusal is None and type(value) is not self._codec.as_written:
                self._codec.read(raw)
        except Exception as error:
            raise InvalidResult(self._task, _explain(error)) from error
        if refusal is not None:
            raise InvalidResult(self._task, refusal)
        return raw.decode()

    def load(self, raw: str | bytes) -> Any:
        """Read a stored result. Raises ValueError (pydantic's ValidationError)."""
        return self._codec.read(raw)


def check_json(payload: object, *, task: str, limit: int) -> str:
    """Return any JSON-able value as JSON of at most `limit` bytes: for tasks that are not registered here.

    Raises InvalidPayload.
    """
    try:
        raw = to_json(payload, by_alias=False, round_trip=True)
    except Exception as error:
        raise InvalidPayload(task, _explain(error)) from error
    refusal = find_unstorable_json(raw, payload, look=True, naive=True, limit=limit)
    if refusal is not None:
        raise InvalidPayload(task, refusal)
    return raw.decode()
