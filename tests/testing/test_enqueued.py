"""assert_enqueued() and refute_enqueued(): what they find, and what they say where it is not as expected."""

import json
from datetime import date
from typing import Any

import pytest

from aioqueue import AioQueue, testing
from tests.testing.tasks import Order

pytestmark = pytest.mark.anyio


async def test_finds_by_every_fact(app: AioQueue[Any], queue: testing.Queue) -> None:
    job = await app.get("order").options(tenant="42", priority=1).enqueue(Order(customer="Ada", cents=[1]))
    await app.get("add").enqueue(1)
    facts: list[dict[str, Any]] = [
        {"payload": {"customer": "Ada"}},
        {"payload": Order(customer="Ada", cents=[1])},
        {"payload": (Order(customer="Ada", cents=[1]),)},
        {"tenant": "42"},
        {"queue": "shop"},
        {"priority": 1},
        {"state": "ready"},
        {"count": 1},
        {},
    ]
    for fact in facts:
        (found,) = await queue.assert_enqueued("order", **fact)
        assert (found.id, found.payload) == (job.id, {"customer": "Ada", "cents": [1]})
    wrong: list[dict[str, Any]] = [
        {"payload": {"customer": "Bob"}},
        {"payload": {"name": "Ada"}},
        {"payload": Order(customer="Ada")},
        {"payload": (Order(customer="Ada"),)},
        {"tenant": None},
        {"queue": "default"},
        {"priority": 0},
        {"state": "dead"},
        {"count": 2},
        {"count": 0},
    ]
    for fact in wrong:
        with pytest.raises(AssertionError):
            await queue.assert_enqueued("order", **fact)
    await queue.assert_enqueued(count=2)
    assert len(await queue.enqueued()) == 2
    assert [job.task for job in await queue.enqueued(app.get("add"))] == ["add"]


async def test_refutes(app: AioQueue[Any], queue: testing.Queue) -> None:
    await queue.refute_enqueued()
    await app.get("order").options(tenant="42").enqueue(Order(customer="Ada"))
    await queue.refute_enqueued("add")
    await queue.refute_enqueued("order", tenant="43")
    with pytest.raises(AssertionError, match="expected no job enqueued, found 1"):
        await queue.refute_enqueued("order", payload={"customer": "Ada"})


async def test_says_what_there_is_and_what_differs(app: AioQueue[Any], queue: testing.Queue) -> None:
    await app.get("add").enqueue(7)
    await app.get("order").options(tenant="42").enqueue(Order(customer="Ada", cents=[1]))
    with pytest.raises(AssertionError) as caught:
        await queue.assert_enqueued("order", payload={"customer": "Bob"}, tenant="43", count=1)
    assert str(caught.value).splitlines() == [
        'expected 1 job enqueued, found 0: order tenant=\'43\' payload={"customer": "Bob"} (these keys)',
        "2 jobs are there:",
        "  - order tenant='42' queue='shop' ready payload=" + json.dumps({"cents": [1], "customer": "Ada"}),
        "      tenant: expected '43', got '42'",
        "      payload['customer']: expected 'Bob', got 'Ada'",
        "  - add queue='default' ready payload=" + json.dumps({"a": 7}),
    ]


async def test_says_that_nothing_is_there(queue: testing.Queue) -> None:
    with pytest.raises(AssertionError, match="no job is there"):
        await queue.assert_enqueued("add")


async def test_what_has_run_was_enqueued(app: AioQueue[Any], queue: testing.Queue) -> None:
    await app.get("add").enqueue(1)
    await queue.drain()
    (job,) = await queue.assert_enqueued("add")
    assert (job.state, job.attempt) == ("succeeded", 1)
    await queue.refute_enqueued("add", state="ready")


async def test_values_are_compared_as_json(app: AioQueue[Any], queue: testing.Queue) -> None:
    @app.task(name="dated")
    async def dated(day: date, words: tuple[str, ...] = ()) -> None: ...

    await dated.enqueue(date(2026, 1, 31))
    await queue.assert_enqueued(dated, payload={"day": date(2026, 1, 31)})
    await queue.assert_enqueued(dated, payload=(date(2026, 1, 31),))


async def test_a_task_that_is_not_there_is_said_so(queue: testing.Queue) -> None:
    with pytest.raises(testing.TestingError, match="expected a task of the app"):
        await queue.refute_enqueued("ad")
