"""The commands `tenant` and `queue`, and what `status`, `job show` and `enqueue` say of limits."""

import pytest

from tests.sql.engine import Session
from tests.test_cli import Call, Prepare, call, prepare, session  # noqa: F401 - the fixtures of the commands' tests

pytestmark = pytest.mark.usefixtures("database")


def test_set_and_list(call: Call, worker_dsn: str) -> None:  # noqa: F811
    assert "weight 1 and no limit" in call("tenant", "list", dsn=worker_dsn).out
    said = call("tenant", "set", "42", "--weight", "3", "--limit", "10", dsn=worker_dsn)
    assert (said.code, said.out) == (0, "tenant 42: weight 3, at most 10 jobs at once\n")
    assert call("tenant", "set", "a", "--pause", dsn=worker_dsn).out == "tenant a: paused\n"
    assert call("tenant", "list", "--json", dsn=worker_dsn).json == [
        {"tenant": "42", "weight": 3.0, "max_running": 10, "paused": False, "running": 0, "parked": 0},
        {"tenant": "a", "weight": 1.0, "max_running": None, "paused": True, "running": 0, "parked": 0},
    ]
    text = call("tenant", "list", dsn=worker_dsn).out
    assert [line.split() for line in text.splitlines()[1:]] == [["42", "3", "10", "0", "0"], ["a", "1", "-", "0", "0", "paused"]]
    assert call("tenant", "set", "a", "--resume", dsn=worker_dsn).out == "tenant a: not paused\n"
    said = call("tenant", "set", "42", "--no-limit", "--weight", "1", dsn=worker_dsn)
    assert (said.code, said.out) == (0, "tenant 42: weight 1, no limit\n")
    assert call("tenant", "list", "--json", dsn=worker_dsn).json == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["42"],
        ["42", "--limit", "0"],
        ["42", "--limit", "1", "--no-limit"],
        ["42", "--weight", "0"],
        ["", "--pause"],
        ["--pause"],
        ["9", "--pause", "--resume"],
    ],
)
def test_what_cannot_be_is_refused(call: Call, worker_dsn: str, arguments: list[str]) -> None:  # noqa: F811
    assert call("tenant", "set", *arguments, dsn=worker_dsn).code in (1, 2)
    assert call("tenant", "list", "--json", dsn=worker_dsn).json == []


def test_status_shows_what_is_paused_and_what_waits(call: Call, worker_dsn: str, prepare: Prepare) -> None:  # noqa: F811
    async def steps(one: Session) -> list[str]:
        await one.limit("T", 1)
        ids = await one.enqueue(4, tenant="T", key="printer 7")
        await one.claim(await one.register())
        return [str(job_id) for job_id in ids]

    ids = prepare(steps)
    said = call("queue", "pause", "mail", dsn=worker_dsn)
    assert (said.code, said.out) == (0, "queue mail: paused, none of its jobs starts\n")
    found = call("status", "--json", dsn=worker_dsn).json
    assert found["paused"] == [{"kind": "queue", "name": "mail"}]
    assert [(limit["kind"], limit["name"], limit["jobs"]) for limit in found["parked"]] == [("tenant", "T", 3)]
    text = call("status", dsn=worker_dsn).out
    for part in ("paused: queue mail", "ready, but waiting for a limit: 3", "tenant T"):
        assert part in text
    assert call("queue", "resume", "mail", dsn=worker_dsn).out == "queue mail: not paused\n"
    assert "paused" not in call("status", dsn=worker_dsn).out
    shown = call("job", "show", ids[1], dsn=worker_dsn).out
    assert "ready, waits for a limit" in shown and "printer 7" in shown
    assert call("job", "list", "--state", "ready", dsn=worker_dsn).out.count("ready") == 3
    assert call("job", "cancel", ids[1], dsn=worker_dsn).code == 0
    assert "cancelled" in call("job", "show", ids[1], dsn=worker_dsn).out


def test_a_client_may_neither_see_nor_change_limits(call: Call, client_dsn: str) -> None:  # noqa: F811
    for command in (["tenant", "set", "42", "--pause"], ["tenant", "list"], ["queue", "pause", "q"]):
        assert call(*command, dsn=client_dsn).code == 1
