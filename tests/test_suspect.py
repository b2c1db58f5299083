"""When a busy worker stands still for a suspect: not at once, for bounded spells, rarely, and long enough in the end."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioqueue.suspect import LONG, LONGEST, PATIENCE, SPELL, WORK, SuspectTurn


def spells(turn: SuspectTurn, until: float, *, busy: float = 1.0, longest: float = 600.0) -> list[tuple[float, float]]:
    """Begin and end of each drain, looked for every quarter of a second."""
    found: list[tuple[float, float]] = []
    now, begun = 0.0, math.nan
    while now < until:
        drains = turn.seconds(now, busy=busy, longest=longest) > 0
        if drains and math.isnan(begun):
            begun = now
        elif not drains and not math.isnan(begun):
            found.append((begun, now))
            begun = math.nan
        now += 0.25
    return found


def test_spells_double_and_the_worker_works_on_for_longer_between_them() -> None:
    found = spells(SuspectTurn(), 10_000.0)
    lengths = [end - begin for begin, end in found]
    assert lengths == pytest.approx([SPELL * 2**n for n in range(len(lengths))], abs=0.5)
    for (start, end), (begin, _) in pairwise(found):
        assert begin - end >= WORK[0] * (end - start) - 2.0
    # Nothing was claimed meanwhile: a job that was within its time limit has ended.
    assert lengths[-1] > 600.0


@given(busy=st.floats(0.0, 1.0), longest=st.floats(0.0, 1e6))
def test_the_first_drain_comes_after_a_patience_that_grows_with_what_is_to_be_waited_out(busy: float, longest: float) -> None:
    turn = SuspectTurn()
    turn.seconds(0.0, busy=busy, longest=longest)
    factor = 1.0 + busy + min(longest, LONGEST) / LONG
    assert turn.seconds(PATIENCE[0] * factor - 0.01, busy=busy, longest=longest) == 0.0
    assert turn.seconds(PATIENCE[1] * factor + 0.01, busy=busy, longest=longest) > 0.0


def test_the_rest_of_the_spell_is_what_is_answered() -> None:
    turn = SuspectTurn()
    begin = next(now / 4 for now in range(1_000) if turn.seconds(now / 4, busy=0, longest=0))
    assert turn.seconds(begin + 4.0, busy=0, longest=0) == pytest.approx(SPELL - 4.0, abs=0.3)
    assert turn.seconds(begin + SPELL, busy=0, longest=0) == 0.0


def test_the_next_suspect_has_a_turn_of_its_own() -> None:
    turn = SuspectTurn()
    spells(turn, 500.0)
    turn.reset()
    assert turn.seconds(500.0, busy=0, longest=0) == 0.0
    assert turn.seconds(500.0 + PATIENCE[1], busy=0, longest=0) <= SPELL
