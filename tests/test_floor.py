"""The scan floor: no job that may be claimed lies below it, whatever transactions do; and it moves on.

A small model of PostgreSQL stands in for the server here: XIDs, snapshots, rows that appear at commit. What the server
really does is tested in tests/sql/test_tick.py.
"""

import json
import random
from dataclasses import dataclass, field
from statistics import median
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioqueue.floor import LONG, MANY, TWICE, Floors, KeyFloors, LaneFloor, Snapshot
from aioqueue.store import LOWEST_ID

STEP = 10
TICK = 0.05


@dataclass
class Transaction:
    xid: int
    rows: list[tuple[int, int]] = field(default_factory=list)
    claimed: list[tuple[int, int]] = field(default_factory=list)


class World:
    """Writers, claims of other processes and one process with a floor, its tick taken apart; each act drawn by chance."""

    def __init__(self, seed: int, *, fault: str | None = None) -> None:
        self.chance = random.Random(seed)
        self.fault = fault
        self.floor: LaneFloor[int] = LaneFloor(0)
        self.now = 0.0
        self.v = 0
        self.next_xid = 10
        self.latest_completed = 9
        self.open: dict[int, Transaction] = {}
        self.ready: set[tuple[int, int]] = set()
        self.late: set[tuple[int, int]] = set()
        self.late_before: set[tuple[int, int]] = set()
        self.claimed = 0
        self.taken = 0
        self.phase = 0
        self.asked: int | None = None
        self.read = 0
        self.own = 0
        self.snapshot = Snapshot(0, frozenset())

    def run(self, steps: int) -> None:
        acts = [self.begin, self.place, self.end, self.claim, self.publish, self.wait, *[self.tick] * 6]
        for _ in range(steps):
            self.chance.choice(acts)()
            below = {row for row in self.ready - self.late if row < self.floor.start}
            assert not below, f"{below} below {self.floor.start}"
            assert self.floor.value <= self.v + 1

    def take_xid(self) -> int:
        self.next_xid += 1
        return self.next_xid - 1

    def begin(self) -> None:
        """A writer takes its XID; its rows may come later."""
        if len(self.open) < 4:
            xid = self.take_xid()
            self.open[xid] = Transaction(xid)
            if self.chance.random() < 0.7:
                self.place()

    def place(self) -> None:
        """A row of an open transaction, at a position above V as it is now; or those of many tenants, which share one."""
        if self.open:
            transaction = self.open[self.chance.choice(list(self.open))]
            position = self.v + STEP * self.chance.randint(1, 3)
            transaction.rows += [(position, self.chance.getrandbits(40)) for _ in range(self.chance.choice([1, 1, 12]))]

    def end(self) -> None:
        """COMMIT or ROLLBACK of any open transaction."""
        if self.open:
            transaction = self.open.pop(self.chance.choice(list(self.open)))
            self.latest_completed = max(self.latest_completed, transaction.xid)
            if self.chance.random() < 0.8:
                self.ready |= set(transaction.rows)
                self.ready -= set(transaction.claimed)
                if transaction.xid in self.floor._aside:
                    self.late |= set(transaction.rows)

    def claim(self) -> None:
        """Another process claims the first ready rows, at once or in a transaction that stays open."""
        locked = {row for t in self.open.values() for row in t.claimed}
        rows = sorted(self.ready - locked)[: self.chance.randint(1, 4)]
        xid = self.take_xid()
        if rows and self.chance.random() < 0.3:
            self.open[xid] = Transaction(xid, claimed=rows)
            return
        self.latest_completed = max(self.latest_completed, xid)
        self.ready -= set(rows)
        self.claimed = max([self.claimed, *(position for position, _ in rows)])
        self.taken += self.chance.choice([0, len(rows), MANY])

    def publish(self) -> None:
        """V moves on, as other processes' claims push it; without an XID in half of the cases."""
        self.v = max(self.v, self.claimed) if self.chance.random() < 0.7 else self.v + STEP * self.chance.randint(1, 8)
        if self.chance.random() < 0.5:
            self.latest_completed = max(self.latest_completed, self.take_xid())

    def wait(self) -> None:
        self.now += self.chance.choice([0.05, 0.05, 0.3, LONG + 0.1])

    def tick(self) -> None:
        """The next part of a tick, in the order of tick.sql."""
        parts = [self.read_v, self.take_snapshot, self.ask]
        if self.fault == "snapshot first":
            parts = [self.take_snapshot, self.read_v, self.ask]
        if self.phase == 0:
            self.asked = self.floor.question
        parts[self.phase]()
        self.phase = (self.phase + 1) % 3

    def read_v(self) -> None:
        self.read = self.v

    def take_snapshot(self) -> None:
        self.own = self.take_xid()
        xmax = self.latest_completed + 1
        running = {xid for xid in self.open if xid < xmax}
        if self.fault == "bare xmax":
            self.snapshot = Snapshot(xmax, frozenset(running))
        else:
            self.snapshot = Snapshot(self.own, frozenset(running | set(range(xmax, self.own))))
        self.late_before = set(self.late)

    def ask(self) -> None:
        self.latest_completed = max(self.latest_completed, self.own)
        if self.asked is not None:
            within = (row for row in self.ready if self.floor.start <= row and row[0] <= self.asked)
            self.floor.answer(self.floor.start, self.asked, min(within, default=None))
        if self.fault == "rewind too short":
            self.floor.seen = self.read
        if self.fault == "no rewind":
            self.floor._aside.clear()
        self.floor.observe(self.read, self.snapshot, self.now, self.taken)
        self.late -= self.late_before
        self.now += 0.05


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**63))
def test_no_ready_job_lies_below_the_floor(seed: int) -> None:
    World(seed).run(400)


@pytest.mark.parametrize("fault", ["snapshot first", "bare xmax", "rewind too short", "no rewind"])
def test_the_model_finds_each_known_fault(fault: str) -> None:
    """So that the test above can fail."""
    with pytest.raises(AssertionError, match="below"):
        for seed in range(300):
            World(seed, fault=fault).run(400)


def run_long_writers(seconds: float, *, lasting: float, every: float, rate: int = 500) -> list[float]:
    """Overlapping writers of `lasting` seconds, a new one `every` so many; how many ticks the floor is behind V, after each.

    `rate`: jobs claimed between two ticks.
    """
    floor: LaneFloor[int] = LaneFloor(0)
    behind: list[float] = []
    running: dict[int, float] = {}
    xid, v, now, started = 10, 0, 0.0, 0.0
    while now < seconds:
        if now >= started:
            xid += 1
            running[xid] = now + lasting
            started = now + every
        running = {x: until for x, until in running.items() if until > now}
        xid += 1
        if (asked := floor.question) is not None:
            floor.answer(floor.start, asked, None)
        floor.observe(v, Snapshot(xid, frozenset(running)), now, v)
        behind.append((v - floor.value) / rate)
        v += rate
        now += TICK
    return behind


@pytest.mark.parametrize(("lasting", "every"), [(0.3, 0.1), (0.9, 0.2), (1.5, 0.4), (1.5, 0.05), (5.0, 0.5)])
def test_the_floor_advances_in_a_steady_stream_of_overlapping_writers(lasting: float, every: float) -> None:
    behind = run_long_writers(60, lasting=lasting, every=every)
    assert max(behind) <= lasting / TICK + 4, "at the end of a writer it goes back to its beginning"
    if every > 2 * TICK:
        assert median(behind) <= 3, "and returns"


def test_a_writer_that_never_ends_holds_nothing_back() -> None:
    assert max(run_long_writers(20, lasting=1e9, every=1e9)[10:]) <= 3
    assert max(run_long_writers(20, lasting=1e9, every=1e9, rate=1)[40:]) <= 3


def risen() -> LaneFloor[int]:
    """A floor as a worker has it that has served for a while."""
    floor: LaneFloor[int] = LaneFloor(0)
    observe(floor, 50, 9)
    observe(floor, 50, 10)
    settle(floor, 50, 11)
    assert floor.start == (51, 0)
    return floor


def test_at_its_start_a_process_does_not_wait_for_a_transaction_that_stays_open() -> None:
    """Its first claims would walk over all that were taken while it is open."""
    floor: LaneFloor[int] = LaneFloor(0)
    floor.observe(100, Snapshot(20, frozenset({15})), 0.0)
    floor.observe(100, Snapshot(21, frozenset({15})), 2 * TWICE)
    assert floor.question == 100
    floor.answer(floor.start, 100, None)
    floor.observe(100, Snapshot(22, frozenset()), 3 * TWICE)
    assert floor.start == (0, 0), "at its end what it has left is looked for"


def test_where_nothing_was_ever_claimed_nobody_is_set_aside_soon() -> None:
    """There is nothing to rise to; a tick that waits for somebody's end would be followed by the next one at once."""
    floor: LaneFloor[int] = LaneFloor(0)
    for n in range(8):
        observe(floor, 0, 20 + n, 15, now=n / 10)
        assert floor.at_rest


def test_where_little_is_claimed_the_job_of_a_short_transaction_is_found_at_its_commit() -> None:
    floor = risen()
    observe(floor, 100, 20)
    for n in range(1, 10):
        floor.observe(100 + n, Snapshot(20 + n, frozenset({15})), n / 10, n)
        assert floor.question is None, "its job may lie from 101 on, and nobody has to look for it first"
    floor.observe(110, Snapshot(30, frozenset({15})), 10 * TWICE + LONG, 10)
    assert floor.question == 109


def test_where_much_is_claimed_no_claim_walks_over_it_for_long() -> None:
    floor = risen()
    observe(floor, 100, 20)
    floor.observe(100, Snapshot(21, frozenset({15})), 0.1, 0)
    floor.observe(100 + MANY, Snapshot(22, frozenset({15})), 0.1 + 2 * TWICE, MANY)
    assert floor.question == 100


def observe(floor: LaneFloor[int], v: int, xmax: int, *running: int, now: float = 0.0) -> None:
    floor.observe(v, Snapshot(xmax, frozenset(running)), now)


def test_a_new_floor_asks_nothing_and_is_at_rest() -> None:
    floor: LaneFloor[int] = LaneFloor(-1)
    assert (floor.start, floor.question, floor.at_rest) == ((0, -1), None, True)
    observe(floor, 0, 10)
    assert (floor.question, floor.at_rest) == (None, True)


def test_the_question_waits_for_every_transaction_that_ran() -> None:
    floor: LaneFloor[int] = LaneFloor(0)
    observe(floor, 100, 20, 15)
    assert (floor.question, floor.at_rest) == (None, False)
    observe(floor, 100, 25, 15, 22)
    assert (floor.question, floor.at_rest) == (None, False)
    observe(floor, 100, 25, 22)
    assert floor.question == 100
    floor.answer(floor.start, 100, None)
    assert floor.start == (101, 0)
    settle(floor, 100, 26)
    assert floor.start == (101, 0)


def settle(floor: LaneFloor[int], v: int, xmax: int) -> None:
    """A few ticks in which nothing happens."""
    for n in range(3):
        if (asked := floor.question) is not None:
            floor.answer(floor.start, asked, None)
        observe(floor, v, xmax + n)
    assert floor.at_rest


def test_a_ready_job_stops_the_floor_at_its_place() -> None:
    floor: LaneFloor[int] = LaneFloor(0)
    observe(floor, 100, 20)
    observe(floor, 100, 21)
    floor.answer(floor.start, 100, (40, 7))
    assert floor.start == (40, 7)
    assert not floor.at_rest


def test_among_jobs_of_one_position_the_floor_goes_on_as_they_are_claimed() -> None:
    """V stands still meanwhile; who comes later comes above it."""
    floor: LaneFloor[int] = LaneFloor(-1)
    for xid in range(11, 15):
        observe(floor, 100, xid)
        if floor.question is not None:
            floor.answer(floor.start, 100, (100, 7))
    assert (floor.start, floor.question) == ((100, 7), None), "nothing was claimed"
    floor.observe(100, Snapshot(20, frozenset({19})), 0.0, 5)
    assert floor.question == 100, "whoever runs now comes above"
    floor.answer(floor.start, 100, (100, 12))
    floor.observe(100, Snapshot(21, frozenset({19})), 0.0, 5)
    assert (floor.start, floor.question) == ((100, 12), None)
    floor.observe(100, Snapshot(22, frozenset({19})), 0.0, 6)
    floor.answer(floor.start, 100, None)
    assert floor.start == (101, -1) and floor.at_rest


def test_an_answer_to_an_older_question_moves_the_floor_only_that_far() -> None:
    floor: LaneFloor[int] = LaneFloor(0)
    observe(floor, 100, 20)
    observe(floor, 200, 21)
    observe(floor, 200, 22)
    assert floor.question == 200
    floor.answer(floor.start, 100, None)
    assert (floor.start, floor.question) == ((101, 0), 200)


def test_an_answer_after_a_rewind_counts_for_nothing() -> None:
    floor: LaneFloor[int] = LaneFloor(0)
    observe(floor, 50, 20)
    observe(floor, 50, 25, 22)
    observe(floor, 100, 30, 22, now=5)
    observe(floor, 150, 31, 22, now=6)
    asked = floor.question
    assert asked == 100
    floor.answer(floor.start, asked, None)
    asked = floor.question
    observe(floor, 150, 32, 22, now=6.1)
    start, asked = floor.start, floor.question
    assert start == (101, 0)
    assert asked == 150
    observe(floor, 200, 33, now=6.2)
    assert floor.start == (50, 0), "back to what the tick before 22 was first seen had read"
    floor.answer(start, asked, None)
    assert floor.start == (50, 0)


def test_a_floor_that_went_back_may_return_with_the_next_answer() -> None:
    """Below it nobody else can leave a row: whoever was running when it came there has ended, or is set aside by itself."""
    floor: LaneFloor[int] = LaneFloor(0)
    observe(floor, 50, 20)
    observe(floor, 60, 25, 22)
    for n in range(4):
        observe(floor, 100 + 10 * n, 30 + n, 22, now=1 + n)
        if (asked := floor.question) is not None:
            floor.answer(floor.start, asked, None)
    assert floor.start == (121, 0)
    observe(floor, 200, 40, now=9)
    assert (floor.start, floor.question) == ((50, 0), 130), "further than it was: all that ran when V was 130 has ended, too"
    floor.answer(floor.start, 130, (70, 3))
    assert floor.start == (70, 3), "what 22 has left"


def test_a_full_look_only_lowers() -> None:
    floor: LaneFloor[int] = LaneFloor(0)
    observe(floor, 100, 20)
    observe(floor, 100, 21)
    floor.answer(floor.start, 100, None)
    floor.lower((150, 3))
    assert floor.start == (101, 0)
    floor.lower((60, 3))
    assert floor.start == (60, 3)


def test_reset_forgets_everything() -> None:
    floor: LaneFloor[int] = LaneFloor(0)
    observe(floor, 100, 20)
    observe(floor, 100, 21, 20)
    observe(floor, 200, 21, 20, now=9)
    floor.answer(floor.start, 100, None)
    floor.reset()
    assert (floor.start, floor.question, floor.at_rest) == ((0, 0), None, True)
    observe(floor, 0, 50)
    assert floor.start == (0, 0)


@pytest.mark.parametrize(
    ("text", "xmax", "running"),
    [("10:10:", 10, []), ("10:20:10,14,15", 20, [10, 14, 15]), ("4294967301:4294967310:4294967305", 4294967310, [4294967305])],
)
def test_a_snapshot_is_read_as_the_server_writes_it(text: str, xmax: int, running: list[int]) -> None:
    assert Snapshot.parse(text) == Snapshot(xmax, frozenset(running))


def test_the_floors_of_a_process_are_at_rest_once_a_tick_has_read_what_was_claimed() -> None:
    floors = Floors([1, 2], LOWEST_ID)
    assert [floors.at_rest] == [True]
    floors.claimed(1, 500)
    assert (floors.at_rest, floors.highest_claimed(1), floors.highest_claimed(2)) == (False, 500, 0)
    floors.begin_tick()
    for lane in (1, 2):
        floors[lane].observe(0, Snapshot(10, frozenset()), 0.0)
    assert [floors.at_rest] == [False], "it was published by that tick and read by none"
    floors.begin_tick()
    for xmax in range(11, 15):
        if (asked := floors[1].question) is not None:
            floors[1].answer(floors[1].start, asked, None)
        floors[1].observe(500, Snapshot(xmax, frozenset()), 0.05)
    assert floors.at_rest
    floors.claimed(1, 400)
    assert floors.highest_claimed(1) == 500
    floors.reset()
    assert (floors.highest_claimed(1), floors[1].value) == (0, 0)


# -- floors of keys -------------------------------------------------------------------------------------------------------


def test_a_keys_floor_never_falls_and_is_forgotten_with_a_lost_connection() -> None:
    floors = KeyFloors()
    assert floors.text(0) == "{}"
    floors.learn({7: 100, -8: 5}, 0)
    floors.learn({7: 40}, 0)
    assert json.loads(floors.text(0)) == {"7": 100, "-8": 5}
    assert floors.text(1) == "{}", "a server that lost commits may have gone back"
    floors.learn({7: 100}, 0)
    assert floors.text(1) == "{}", "said before the loss"
    floors.learn({7: 3}, 1)
    assert json.loads(floors.text(1)) == {"7": 3}
    floors.reset()
    assert floors.text(1) == "{}"


def test_the_keys_met_last_are_kept() -> None:
    floors = KeyFloors(capacity=3)
    for key in (1, 2, 3):
        floors.learn({key: key}, 0)
    floors.learn({1: 1}, 0)
    floors.learn({4: 4, 5: 5}, 0)
    assert json.loads(floors.text(0)) == {"1": 1, "4": 4, "5": 5}


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.booleans()), max_size=60), st.integers(1, 4))
def test_a_keys_floor_is_never_above_a_row_that_is_there(steps: list[tuple[int, bool, bool]], capacity: int) -> None:
    """Rows come at rising positions and go in any order; answers are taken in late and in any order."""
    floors, rows, answers, position = KeyFloors(capacity), {key: list[int]() for key in range(1, 5)}, list[dict[int, int]](), 0
    for key, comes, late in steps:
        position += 1
        if comes:
            rows[key].append(position)
        elif rows[key]:
            rows[key].pop(position % len(rows[key]))
        answers.append({key: min(rows[key], default=position + 1)})
        if not late:
            floors.learn(answers.pop(position % len(answers)), 0)
        for name, floor in json.loads(floors.text(0)).items():
            assert floor <= min(rows[int(name)], default=position + 1)


def test_a_floor_that_went_back_is_told_once() -> None:
    floors = Floors([1, 2], LOWEST_ID)
    assert not floors.take_lowered()
    floor = floors[1]
    floor.value = 100
    floor.observe(100, Snapshot(20, frozenset({15})), 0.0)
    floor.observe(100, Snapshot(20, frozenset({15})), 2.0)  # set aside
    assert not floors.take_lowered()
    floor.observe(100, Snapshot(21, frozenset()), 2.1)
    assert floors.take_lowered()
    assert not floors.take_lowered()
    floor.value = 100
    floor.lower((50, UUID(int=1)))
    assert floors.take_lowered()
