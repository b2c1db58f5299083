"""Settings: the defaults hold, and what cannot work is refused where it is made."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioqueue import AioQueue
from aioqueue.errors import ConfigurationError
from aioqueue.settings import (
    NAME_LIMIT,
    LeaseSettings,
    LimitSettings,
    PoolSettings,
    RetentionSettings,
    Settings,
    TenantSettings,
    WorkerSettings,
    check_name,
    check_schema_name,
    parse_queues,
)


def test_defaults_are_valid() -> None:
    settings = Settings()
    assert settings.schema == "aioqueue"
    assert settings.lease.beat_seconds == settings.lease.lease / 3


def test_settings_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Settings().schema = "other"  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("schema", ["aioqueue", "Jobs", "my jobs", "a-b.c", "größe", "é" * 31])
def test_schema_names(schema: str) -> None:
    assert check_schema_name(schema) == schema
    assert Settings(schema=schema).schema == schema


@pytest.mark.parametrize("schema", ["", " ", "a'b", "a$b", "a%b", "a\\b", "a\nb", "a\x00b", "a" * 64, "é" * 32])
def test_schema_names_refused(schema: str) -> None:
    with pytest.raises(ConfigurationError, match="schema"):
        Settings(schema=schema)


@given(st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), min_size=1, max_size=NAME_LIMIT))
def test_names_are_returned_as_they_are(name: str) -> None:
    if name.strip():
        assert check_name("queue", name) == name
    else:
        with pytest.raises(ValueError, match="queue: expected a name"):
            check_name("queue", name)


@pytest.mark.parametrize("name", ["", "  ", "a\x00", "a\ud800", "a" * (NAME_LIMIT + 1)])
def test_names_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"^tenant: "):
        check_name("tenant", name)


@pytest.mark.parametrize("name", [None, 42, b"a"])
def test_names_of_another_type(name: object) -> None:
    with pytest.raises(TypeError, match="tenant: expected a string"):
        check_name("tenant", name)


class TestQueues:
    def test_names_with_and_without_weights(self) -> None:
        assert parse_queues(("a", "b:3", "c:100", "e:f:4")) == {"a": 1, "b": 3, "c": 100, "e:f": 4}

    def test_a_colon_without_a_weight_is_refused_with_what_to_write(self) -> None:
        with pytest.raises(ConfigurationError, match=r"'billing:x': expected name or name:weight.* weight: 'billing:x:1'"):
            parse_queues(("billing:x",))
        assert parse_queues(("billing:x:1",)) == {"billing:x": 1}

    @pytest.mark.parametrize(
        "names",
        [("",), (":3",), ("a", "a"), ("a", "a:2"), ("a:0",), ("a:101",), ("a\x00",), ("a:",), ("a:2x",), ("a:-1",), ("a:²",)],
    )
    def test_refused(self, names: tuple[str, ...]) -> None:
        with pytest.raises(ConfigurationError, match="queue"):
            WorkerSettings(queues=names)

    @pytest.mark.parametrize("queues", ["ab,c", "", b"ab", 7, None, [1], {"a": 3}])
    def test_what_is_no_sequence_of_names_is_refused(self, queues: Any) -> None:
        with pytest.raises(ConfigurationError, match=r'expected a sequence of names such as \("a", "b:3"\), got'):
            WorkerSettings(queues=queues)
        if queues is not None:
            with pytest.raises(ConfigurationError, match="expected a sequence of names"):
                AioQueue("postgresql://").worker(queues=queues)

    @pytest.mark.parametrize("queues", [["a", "b:3"], ("a", "b:3")])
    def test_any_sequence_is_taken(self, queues: Any) -> None:
        assert WorkerSettings(queues=queues) == WorkerSettings(queues=("a", "b:3"))


@pytest.mark.parametrize(
    ("kind", "wrong", "about"),
    [
        (PoolSettings, {"size": 2}, "pool size"),
        (PoolSettings, {"min_size": 0}, "min_size"),
        (PoolSettings, {"size": 3, "min_size": 4}, "min_size"),
        (PoolSettings, {"acquire_timeout": 0}, "positive"),
        (PoolSettings, {"deadline": -1}, "positive"),
        (LeaseSettings, {"lease": 0.1}, "lease"),
        (LeaseSettings, {"lease": 3, "beat": 1.5}, "beat"),
        (LeaseSettings, {"beat": 0}, "beat"),
        (LeaseSettings, {"rescue_interval": 0}, "rescue_interval"),
        (LimitSettings, {"time_limit": 0}, "time_limit"),
        (LimitSettings, {"transaction_wait": -1}, "transaction_wait"),
        (LimitSettings, {"grace": -1}, "grace"),
        (LimitSettings, {"payload": 0}, "payload: expected 1 to 100,000,000 bytes, got 0"),
        (LimitSettings, {"result": 100_000_001}, "result: expected 1 to 100,000,000 bytes"),
        (WorkerSettings, {"concurrency": 0}, "concurrency"),
        (WorkerSettings, {"claim_batch": 0}, "claim_batch"),
        (WorkerSettings, {"tick": 2.0}, "tick"),
        (WorkerSettings, {"tick": 0}, "tick"),
        (TenantSettings, {"setting": "tenant"}, "tenants setting"),
        (TenantSettings, {"setting": "app.tenant; drop"}, "tenants setting"),
        (TenantSettings, {"setting": "Aioqueue_Job.tenant"}, "tenants setting"),
        (TenantSettings, {"values": {"app.user": "1"}}, "tenants values"),
        (TenantSettings, {"role": " "}, "tenants role"),
        (TenantSettings, {"role": 7}, "tenants role"),
        (Settings, {"schema": 7}, "schema: expected str, got int"),
        (RetentionSettings, {"succeeded": 60}, "an hour at least"),
        (RetentionSettings, {"succeeded": "7d"}, "retention succeeded: expected seconds, a timedelta or None, got '7d'"),
        (RetentionSettings, {"unsuccessful": [1]}, "retention unsuccessful: expected seconds, a timedelta or None, got"),
        (RetentionSettings, {"succeeded": True}, "retention succeeded: expected seconds"),
        (AioQueue, {"dsn": 7}, "dsn: expected str, got int"),
        (AioQueue, {"listen_dsn": 7}, "listen_dsn: expected str, got int"),
        (AioQueue, {"tenants": "app.tenant"}, "tenants: expected TenantSettings, got str"),
        (AioQueue, {"pool": 10}, "pool: expected PoolSettings, got int"),
        (AioQueue, {"lease": 3}, "lease: expected LeaseSettings, got int"),
        (AioQueue, {"limits": PoolSettings()}, "limits: expected LimitSettings, got PoolSettings"),
        (AioQueue, {"worker": 0}, "worker: expected WorkerSettings, got int"),
        (AioQueue, {"retention": {}}, "retention: expected RetentionSettings, got dict"),
    ],
)
def test_refused(kind: type[Any], wrong: dict[str, Any], about: str) -> None:
    with pytest.raises(ConfigurationError, match=about):
        kind(**wrong)


def test_edges_are_allowed() -> None:
    assert LeaseSettings(lease=3, beat=1).beat_seconds == 1
    assert LimitSettings(grace=0).grace == 0
    assert PoolSettings(size=3, min_size=3).size == 3
    assert RetentionSettings(succeeded=timedelta(hours=1), unsuccessful=None).succeeded_seconds == 3600
