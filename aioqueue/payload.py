"""A task's arguments as JSON, and back: the codec that is made once from its signature, and what it refuses.

A payload is refused at enqueue, in the caller's stack, if the worker could not read it back as it was given.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, Required, cast

from pydantic import AliasChoices, AliasPath, BaseModel, ConfigDict, RootModel, ValidationError
from pydantic_core import from_json, to_json
from typing_extensions import TypedDict

from .codec import Codec, explain, unknown_argument
from .errors import InvalidPayload, TaskDefinitionError
from .unstorable import find_unstorable_json, is_surely_read

TOGETHER = 100
"""Payloads that are looked at together: what is made of more to that end would call the garbage collector."""


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
            self._codec = Codec(shape)
            self._wrapped = self._model is not None and _may_be_wrapped(self._model, parameters[0].annotation)
        except Exception as error:
            raise TaskDefinitionError(f"task {task!r}: {_blame(parameters, error)}") from error

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
                raise InvalidPayload(self._task, unknown_argument(name, self._names))
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
        return InvalidPayload(self._task, explain(error, self._names if self._model is None else None))

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
            Codec(parameter.annotation)
        except Exception as reason:
            text = str(reason).partition("\n")[0]
            return f"the annotation of parameter {parameter.name!r} cannot be a payload: {text}"
    return f"no payload can be made from its parameters: {str(error).partition(chr(10))[0]}"


def check_json(payload: object, *, task: str, limit: int) -> str:
    """Return any JSON-able value as JSON of at most `limit` bytes: for tasks that are not registered here.

    Raises InvalidPayload.
    """
    try:
        raw = to_json(payload, by_alias=False, round_trip=True)
    except Exception as error:
        raise InvalidPayload(task, explain(error)) from error
    refusal = find_unstorable_json(raw, payload, look=True, naive=True, limit=limit)
    if refusal is not None:
        raise InvalidPayload(task, refusal)
    return raw.decode()
