"""When a failed attempt is tried again: a policy as a value, asked for a delay. It owns no clock and no dice.

`RetryIn`, raised by a task, overrides it in attempt.py; how many attempts a job has stands in the job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from .errors import ConfigurationError
from .settings import DEFAULT_MAX_ATTEMPTS

LONGEST_DELAY = 10 * 365 * 86_400.0
"""Seconds; the same bound as for `Snooze` and `RetryIn`."""
MAX_ATTEMPTS_LIMIT = 1_000


def check_max_attempts(value: object) -> int:
    """Return a number of attempts, or raise ValueError with what is wrong with it."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_ATTEMPTS_LIMIT:
        raise ValueError(f"expected a whole number from 1 to {MAX_ATTEMPTS_LIMIT}, got {value!r}")
    return value


def check_delay(value: object) -> float:
    """Return a duration in seconds, or raise ValueError with what is wrong with it."""
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value)
    else:
        raise ValueError(f"expected seconds or a timedelta, got {value!r}")  # noqa: TRY004 - one kind
    if not 0 <= seconds <= LONGEST_DELAY:
        raise ValueError(f"expected a duration from 0 s to 10 years, got {value!r}")
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How often and how soon a failed job is tried again.

    After failure number n the job waits a random time from 0 s to `min(cap, base · factor ** (n - 1))` ("full
    jitter": jobs that failed together do not come back together).
    """

    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    """Attempts in all, the first one included; stored with the job, `.options(max_attempts=…)` wins."""
    base: float | timedelta = 1.0
    """The longest wait after the first failure; seconds or a timedelta."""
    factor: float = 2.0
    """What the longest wait is multiplied with after each further failure; at least 1."""
    cap: float | timedelta = 3600.0
    """No wait is longer than this; seconds or a timedelta, at least `base`."""
    jitter: bool = True
    """False: wait exactly the longest wait. Jobs that failed together then come back together."""
    on: Mapping[type[BaseException], Retry | bool | timedelta] = field(default_factory=dict, hash=False)
    """Exceptions that differ; the nearest class in the exception's MRO wins.

    False: dead at once. True: as this policy says. A timedelta: exactly that wait. A `Retry`: its waits, and
    dead after its own `max_attempts` if the job's are more.
    """

    def __post_init__(self) -> None:
        limits: dict[str, float] = {}
        try:
            check_max_attempts(self.max_attempts)
        except ValueError as error:
            raise ConfigurationError(f"Retry(max_attempts=): {error}") from None
        for name, value in (("base", self.base), ("cap", self.cap)):
            try:
                limits[name] = check_delay(value)
            except ValueError as error:
                raise ConfigurationError(f"Retry({name}=): {error}") from None
        if limits["cap"] < limits["base"]:
            raise ConfigurationError(f"Retry(cap=): at least base ({limits['base']:g} s), got {limits['cap']:g} s")
        factor: object = self.factor
        if not isinstance(factor, (int, float)) or isinstance(factor, bool) or not 1 <= factor < math.inf:
            raise ConfigurationError(f"Retry(factor=): expected a number of at least 1, got {factor!r}")
        if not isinstance(self.jitter, bool):
            raise ConfigurationError(f"Retry(jitter=): expected True or False, got {self.jitter!r}")
        if not isinstance(self.on, Mapping):
            raise ConfigurationError(f"Retry(on=): expected a mapping such as {{ValueError: False}}, got {self.on!r}")
        for kind, policy in self.on.items():
            _check_policy(kind, policy)
        object.__setattr__(self, "on", dict(self.on))

    def delay(self, error: BaseException, *, failures: int, random: Callable[[], float]) -> float | None:
        """Return the seconds to wait after `error`, or None where the job is dead now.

        `failures` counts the attempts held against the job, this one included, from 1. `random` returns a
        number from 0 to 1. Whether the job has attempts left is the caller's question: the job's own number
        decides it.
        """
        for kind in type(error).__mro__:
            policy = self.on.get(kind)
            if policy is None:
                continue
            if policy is True:
                break
            if policy is False:
                return None
            if isinstance(policy, timedelta):
                return policy.total_seconds()
            return policy._wait(failures, random) if failures < policy.max_attempts else None
        return self._wait(failures, random)

    def _wait(self, failures: int, random: Callable[[], float]) -> float:
        cap = check_delay(self.cap)
        try:
            longest = min(cap, check_delay(self.base) * float(self.factor) ** (failures - 1))
        except OverflowError:  # the power left the range of floats; a base of 0 s stays 0 s
            longest = cap if check_delay(self.base) else 0.0
        return longest * random() if self.jitter else longest


def _check_policy(kind: object, policy: object) -> None:
    if not isinstance(kind, type) or not issubclass(kind, BaseException):
        raise ConfigurationError(f"Retry(on=): expected exception classes as keys, got {kind!r}")
    name = kind.__qualname__
    if isinstance(policy, timedelta):
        try:
            check_delay(policy)
        except ValueError as error:
            raise ConfigurationError(f"Retry(on={{{name}: …}}): {error}") from None
    elif isinstance(policy, Retry):
        if policy.on:
            raise ConfigurationError(f"Retry(on={{{name}: …}}): a Retry inside another has no on= of its own")
    elif not isinstance(policy, bool):
        raise ConfigurationError(f"Retry(on={{{name}: …}}): expected False, True, a timedelta or a Retry, got {policy!r}")
