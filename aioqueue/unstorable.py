"""What JSON or PostgreSQL would change silently, or refuse: found in Python values and in their JSON text.

Pure: a value in, a reason or None out. The codecs decide when to look.
"""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections import deque
from collections.abc import Iterable, Mapping
from datetime import datetime
from decimal import Decimal
from enum import Enum

from pydantic import BaseModel, Secret, SecretBytes, SecretStr
from pydantic_core import from_json

_PLAIN = frozenset({str, int, bool, type(None)})
_DEEPEST = 300  # beyond what pydantic writes (255)
_ESCAPED_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
_NUMBER, _DEPTH = 4000, 150
"""Digits of a number, and brackets in one another, that pydantic still reads again."""
_REPLACEMENT = "\ufffd".encode()
_STARS = b'"**********"'


def find_unstorable(value: object, *, naive: bool = True, secrets: bool = True) -> str | None:
    """Look through a Python value, however nested, for what JSON or PostgreSQL would change or refuse.

    Return the reason with its place, or None. `naive` and `secrets` say whether naive datetimes and
    pydantic's secrets count. NUL and lone surrogates in values are found in the JSON text; in keys they are
    found here.
    """
    found = _find(value, naive, secrets, 0)
    if found is None:
        return None
    reason, *place = found
    return f"{'.'.join(reversed(place))}: {reason}" if place else reason


def _find(value: object, naive: bool, secrets: bool, depth: int) -> list[str] | None:
    if depth > _DEEPEST:
        return ["nested too deep, or contains itself"]
    kind = type(value)
    if kind is list:  # the common kinds first: this may run for each job of a bulk enqueue
        return _find_in(enumerate(typing.cast(list[object], value)), naive, secrets, depth)
    if kind in _PLAIN or isinstance(value, (str, int, bytes, Enum)):
        return None
    if isinstance(value, (float, Decimal)):
        return None if math.isfinite(value) else [f"{value} cannot be stored as JSON; use None or a string"]
    if isinstance(value, datetime):
        if naive and value.utcoffset() is None:
            return ["a datetime without time zone means another moment on another machine; give it a tzinfo"]
        return None
    if isinstance(value, (SecretStr, SecretBytes, Secret)):
        return ["a secret would be stored as '**********'; pass a plain value, or better an id"] if secrets else None
    if isinstance(value, BaseModel):
        return _find_in({**vars(value), **(value.model_extra or {})}.items(), naive, secrets, depth)
    if isinstance(value, Mapping):
        for key in value:
            if isinstance(key, str):
                if not key.isascii() and not key.isprintable() and _has_surrogate(key):
                    return [f"the key {key!r} has a lone surrogate"]
            elif (found := _find(key, naive, secrets, depth + 1)) is not None:
                return [f"as a key, {found[0]}"]
        return _find_in(value.items(), naive, secrets, depth)
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return _find_in(enumerate(value), naive, secrets, depth)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
        return _find_in(pairs, naive, secrets, depth)
    if isinstance(value, typing.SupportsFloat) and not isinstance(value, type):  # numpy's scalars, fractions
        try:
            finite = math.isfinite(float(value))
        except (TypeError, ValueError, OverflowError):  # not a single finite number: the JSON writer decides
            finite = True
        return None if finite else [f"{value} cannot be stored as JSON; use None or a string"]
    if isinstance(value, complex) and not (math.isfinite(value.real) and math.isfinite(value.imag)):
        return [f"{value} cannot be stored as JSON; use None or a string"]
    return None


def _find_in(pairs: Iterable[tuple[object, object]], naive: bool, secrets: bool, depth: int) -> list[str] | None:
    for key, value in pairs:
        kind = type(value)
        if kind in _PLAIN or (kind is float and math.isfinite(typing.cast(float, value))):
            continue
        found = _find(value, naive, secrets, depth + 1)
        if found is not None:
            found.append(str(key))
            return found
    return None


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def is_surely_read(raw: bytes, *, number: int, longest: int) -> bool:
    """Whether an array of so many JSON objects, none longer than that, is too flat and short for what pydantic does not read."""
    return longest <= _NUMBER and raw.count(b"[") + raw.count(b"{") - number <= _DEPTH


def find_unstorable_json(raw: bytes, value: object, *, look: bool, naive: bool, limit: int, read: bool = False) -> str | None:
    """Say why the JSON text of a value cannot be stored, or None; `read`: it is known to be read again."""
    if len(raw) > limit:
        return f"{len(raw):,} bytes of JSON, at most {limit:,} are allowed; store it elsewhere, pass a reference"
    if b"\\u0000" in raw and _ESCAPED_NUL.search(raw):
        return "a string or key has a NUL character, which PostgreSQL cannot store"
    # pydantic writes a lone surrogate in the key of a typed dict as U+FFFD, elsewhere it raises.
    if look or _REPLACEMENT in raw:
        reason = find_unstorable(value, naive=naive, secrets=_STARS in raw)
        if reason is not None:
            return reason
    # pydantic writes deeper JSON and longer numbers than it reads.
    if not read and (len(raw) > _NUMBER or raw.count(b"[") + raw.count(b"{") > _DEPTH):
        try:
            from_json(raw)
        except ValueError as error:
            return f"the JSON could not be read again: {error}"
    return None
