"""Outcome: error text that can always be stored, and the words of a task."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioqueue.outcome import (
    MESSAGE_LIMIT,
    TRACEBACK_LIMIT,
    Cancel,
    ErrorText,
    JobSignal,
    RetryIn,
    Snooze,
    storable,
)

ANY_TEXT = st.text(st.characters(categories=None), max_size=300)


def is_storable(text: str) -> bool:
    text.encode("utf-8")  # raises for a lone surrogate
    return "\x00" not in text


@given(text=ANY_TEXT, limit=st.integers(min_value=2, max_value=400))
def test_storable_is_storable_and_bounded(text: str, limit: int) -> None:
    clean = storable(text, limit)
    assert is_storable(clean)
    assert len(clean) <= limit + 60


@given(text=st.text(max_size=200).filter(lambda text: "\x00" not in text))
def test_storable_leaves_good_text_alone(text: str) -> None:
    assert storable(text, 200) == text


def test_storable_shows_what_it_replaced() -> None:
    assert storable("a\x00b\ud800c", 100) == "a\\x00b\\ud800c"


def test_storable_keeps_head_and_tail() -> None:
    clean = storable("h" * 500 + "m" * 9000 + "t" * 500, 1000)
    assert clean.startswith("h" * 500 + "\n")
    assert clean.endswith("\n" + "t" * 500)
    assert "9,000 characters left out" in clean


def test_error_is_described() -> None:
    try:
        raise KeyError("some key")
    except KeyError as error:
        text = ErrorText.of(error)
    assert (text.type, text.message) == ("KeyError", "'some key'")
    assert text.traceback is not None
    assert "test_error_is_described" in text.traceback


def test_traceback_can_be_left_out() -> None:
    assert ErrorText.of(ValueError("x"), with_traceback=False) == ErrorText("ValueError", "x", None)


def test_type_is_named_with_its_module() -> None:
    assert ErrorText.of(RetryIn(1), with_traceback=False).type == "aioqueue.outcome.RetryIn"


class Broken(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def test_error_whose_text_raises() -> None:
    text = ErrorText.of(Broken())
    assert text.message == "(its __str__ raised RuntimeError)"
    assert text.type.endswith("Broken")


@given(message=ANY_TEXT, note=ANY_TEXT)
def test_any_text_in_an_error_can_be_stored(message: str, note: str) -> None:
    error = ValueError(message)
    error.add_note(note)
    text = ErrorText.of(error)
    assert is_storable(text.message)
    assert is_storable(text.traceback or "")


def test_class_with_nul_in_its_name() -> None:
    class Odd(Exception): ...

    Odd.__qualname__ = "Odd\x00\ud800"
    assert ErrorText.of(Odd(), with_traceback=False).type == f"{__name__}.Odd\\x00\\ud800"


def test_wide_groups_and_endless_messages_are_bounded() -> None:
    group = ExceptionGroup("many", [ValueError("x" * 10_000) for _ in range(1000)])
    for error in (group, ValueError("x" * 10_000_000)):
        text = ErrorText.of(error)
        assert len(text.message) <= MESSAGE_LIMIT + 60
        assert text.traceback is not None
        assert len(text.traceback) <= TRACEBACK_LIMIT + 60


def test_a_million_exceptions_are_described_by_the_first_few() -> None:
    leaf = KeyError("leaf")
    wide = ExceptionGroup("wide", [leaf] * 1000)
    wide.add_note("a note")
    text = ErrorText.of(ExceptionGroup("all", [ExceptionGroup("half", [wide] * 1000)] * 1000))
    assert (text.type, text.message) == ("ExceptionGroup", "all (1000 sub-exceptions)")
    assert text.traceback is not None
    assert text.traceback.count("995 more exceptions") == 1 + 5 + 25
    assert text.traceback.count("KeyError: 'leaf'") == 125
    assert "a note" in text.traceback


def test_the_group_that_an_error_came_from_is_shown_and_what_is_nested_too_deeply_is_not() -> None:
    deep: Any = ValueError("at the bottom")
    for number in range(9):
        deep = ExceptionGroup(f"level {number}", [deep])
    try:
        try:
            raise deep
        except ExceptionGroup as group:
            raise RuntimeError("came of it") from group
    except RuntimeError as error:
        text = ErrorText.of(error)
    assert text.traceback is not None
    assert "direct cause" in text.traceback and "level 8" in text.traceback
    assert "at the bottom" not in text.traceback


def test_endless_recursion_is_described() -> None:
    def endless() -> None:
        endless()

    with pytest.raises(RecursionError) as caught:
        endless()
    assert ErrorText.of(caught.value).type == "RecursionError"


@pytest.mark.parametrize("word", [Snooze, RetryIn])
class TestDelays:
    def test_seconds_or_timedelta(self, word: type[Snooze] | type[RetryIn]) -> None:
        assert word(3).delay == 3
        assert word(timedelta(minutes=1)).delay == 60
        assert word(0).delay == 0

    @pytest.mark.parametrize("delay", [-1, float("nan"), float("inf"), timedelta(days=3651), timedelta(-1)])
    def test_refused(self, word: type[Snooze] | type[RetryIn], delay: float | timedelta) -> None:
        with pytest.raises(ValueError, match="between 0 s and 10 years"):
            word(delay)


def test_words_are_signals_with_text() -> None:
    assert all(issubclass(word, JobSignal) for word in (Snooze, RetryIn, Cancel))
    assert str(RetryIn(1, "rate limit")) == "rate limit"
    assert Cancel("too late").reason == "too late" == str(Cancel("too late"))
