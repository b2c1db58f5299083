"""Retry: the delays and their bounds, what differs by exception, and the policies that are refused."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioqueue.errors import ConfigurationError
from aioqueue.retry import Retry

FAILURES = st.integers(min_value=1, max_value=10_000)
UNIT = st.floats(min_value=0, max_value=1)


def longest(retry: Retry, failures: int, error: BaseException | None = None) -> float | None:
    return retry.delay(error or ValueError(), failures=failures, random=lambda: 1.0)


def test_defaults_double_from_one_second_to_one_hour() -> None:
    retry = Retry()
    assert [longest(retry, n) for n in (1, 2, 3, 12, 13, 5000)] == [1, 2, 4, 2048, 3600, 3600]


def test_jitter_is_full() -> None:
    retry = Retry(base=8)
    assert retry.delay(ValueError(), failures=2, random=lambda: 0.0) == 0
    assert retry.delay(ValueError(), failures=2, random=lambda: 0.25) == 4


def test_without_jitter_the_dice_are_not_asked() -> None:
    def dice() -> float:
        raise AssertionError

    assert Retry(base=8, jitter=False).delay(ValueError(), failures=2, random=dice) == 16


def test_durations_may_be_timedeltas() -> None:
    retry = Retry(base=timedelta(minutes=1), cap=timedelta(minutes=3))
    assert [longest(retry, n) for n in (1, 2, 3)] == [60, 120, 180]


@given(
    base=st.floats(min_value=0, max_value=3600),
    factor=st.floats(min_value=1, max_value=1e300),
    failures=FAILURES,
    random=UNIT,
)
def test_delay_is_within_its_bounds(base: float, factor: float, failures: int, random: float) -> None:
    delay = Retry(base=base, factor=factor).delay(ValueError(), failures=failures, random=lambda: random)
    assert delay is not None
    assert 0 <= delay <= 3600
    if base == 0:
        assert delay == 0


@given(base=st.floats(min_value=0, max_value=60), failures=FAILURES)
def test_longest_wait_never_shrinks(base: float, failures: int) -> None:
    before, after = longest(Retry(base=base), failures), longest(Retry(base=base), failures + 1)
    assert before is not None
    assert after is not None
    assert before <= after


def test_the_jobs_own_number_of_attempts_decides_not_the_policys() -> None:
    assert longest(Retry(max_attempts=2), 50) == 3600


class TestOn:
    def test_false_is_dead_at_once(self) -> None:
        assert longest(Retry(on={ValueError: False}), 1) is None

    def test_others_are_retried(self) -> None:
        assert longest(Retry(on={ValueError: False}), 1, KeyError()) == 1

    def test_subclasses_count(self) -> None:
        assert longest(Retry(on={LookupError: False}), 1, KeyError()) is None

    def test_nearest_class_wins_in_any_order(self) -> None:
        for on in ({LookupError: False, KeyError: True}, {KeyError: True, LookupError: False}):
            assert longest(Retry(on=on), 3, KeyError()) == 4
            assert longest(Retry(on=on), 3, IndexError()) is None

    def test_timedelta_is_exact(self) -> None:
        retry = Retry(on={TimeoutError: timedelta(seconds=7)})
        assert retry.delay(TimeoutError(), failures=9, random=lambda: 0.0) == 7

    def test_policy_of_its_own_has_its_own_waits_and_attempts(self) -> None:
        retry = Retry(max_attempts=10, on={TimeoutError: Retry(base=100, max_attempts=3)})
        assert [longest(retry, n, TimeoutError()) for n in (1, 2, 3)] == [100, 200, None]
        assert longest(retry, 3, KeyError()) == 4

    def test_exceptions_outside_exception_count(self) -> None:
        assert longest(Retry(on={SystemExit: False}), 1, SystemExit(1)) is None
        assert longest(Retry(on={BaseException: False}), 1, KeyboardInterrupt()) is None

    def test_later_changes_of_the_mapping_do_not_count(self) -> None:
        on: dict[type[BaseException], bool] = {}
        retry = Retry(on=on)
        on[ValueError] = False
        assert longest(retry, 1) == 1


@pytest.mark.parametrize(
    ("wrong", "about"),
    [
        ({"max_attempts": 0}, "max_attempts"),
        ({"max_attempts": True}, "max_attempts"),
        ({"max_attempts": 2.5}, "max_attempts"),
        ({"max_attempts": 1001}, "max_attempts"),
        ({"base": -1}, "base"),
        ({"base": float("nan")}, "base"),
        ({"base": "1"}, "base"),
        ({"base": True}, "base"),
        ({"cap": float("inf")}, "cap"),
        ({"cap": timedelta(days=4000)}, "cap"),
        ({"base": 10, "cap": 5}, "cap"),
        ({"factor": 0.5}, "factor"),
        ({"factor": float("nan")}, "factor"),
        ({"factor": float("inf")}, "factor"),
        ({"factor": "2"}, "factor"),
        ({"jitter": "full"}, "jitter"),
        ({"on": [ValueError]}, "on"),
        ({"on": {"ValueError": False}}, "on"),
        ({"on": {int: False}}, "on"),
        ({"on": {ValueError: 3}}, "ValueError"),
        ({"on": {ValueError: None}}, "ValueError"),
        ({"on": {ValueError: timedelta(seconds=-1)}}, "ValueError"),
        ({"on": {ValueError: Retry(on={KeyError: False})}}, "ValueError"),
    ],
)
def test_refused(wrong: dict[str, Any], about: str) -> None:
    with pytest.raises(ConfigurationError, match=about):
        Retry(**wrong)
