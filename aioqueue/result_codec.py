"""A task's return value as JSON, and back: the codec that is made once from its return annotation, and what it refuses.

A result is refused before it is stored, where its attempt ends, if a waiter could not read it back as it was returned.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any

from .codec import Codec, explain
from .errors import InvalidResult, TaskDefinitionError

PLAIN_TYPES: frozenset[type] = frozenset({type(None), bool, int, float, str, bytes, list, dict, tuple})
"""Values of exactly these are no awaitables and no iterators; asking any other way costs more."""


class ResultCodec:
    """A task's return value as JSON, and back."""

    __slots__ = ("_codec", "_task")

    def __init__(self, annotation: object, *, task: str) -> None:
        self._task = task
        try:
            self._codec = Codec(annotation)
        except Exception as error:
            text = str(error).partition("\n")[0]
            raise TaskDefinitionError(f"task {task!r}: its return annotation cannot be a result: {text}") from error

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
            raise InvalidResult(self._task, explain(error)) from error
        if refusal is not None:
            raise InvalidResult(self._task, refusal)
        return raw.decode()

    def load(self, raw: str | bytes) -> Any:
        """Read a stored result. Raises ValueError (pydantic's ValidationError)."""
        return self._codec.read(raw)
