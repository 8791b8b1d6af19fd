"""Checks of a PostgreSQL database. Every statement is a look; no table is made."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from leasecron_sync.backends._postgres_link import Link
from leasecron_sync.backends._postgres_schema import (
    ENCODINGS,
    FUNCTIONS,
    OLDEST_SERVER,
    TABLES,
    Names,
    sql_of,
)
from leasecron_sync.backends.postgres import PostgresLease
from leasecron_sync.doctor.finding import Examination, Findings
from leasecron_sync.doctor.host import check_client
from leasecron_sync.doctor.store_format import tell_format
from leasecron_sync.doctor.visit import Visit, check_answers
from leasecron_sync.errors import OutcomeUnknown, StoreRejected, StoreUnavailable

_SETTINGS: Final = (
    "synchronous_commit",
    "synchronous_standby_names",
    "fsync",
    "full_page_writes",
    "default_transaction_read_only",
    "transaction_timeout",
    "autovacuum",
)
_SHORT_MS: Final = 1_000
"""A limit of the server's below this can end a call that is merely slow."""

_FROM: Final = {
    "database": "ALTER DATABASE ... SET",
    "user": "ALTER ROLE ... SET",
    "database user": "ALTER ROLE ... IN DATABASE ... SET",
    "client": "options in the URL, or PGOPTIONS",
}
_IN_FILE: Final = "postgresql.conf or ALTER SYSTEM"

_NOW: Final = "SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
_PID: Final = "SELECT pg_backend_pid()"


class _Rights(NamedTuple):
    """The row of ``rights.sql``."""

    has_schema: bool
    usage: bool
    create: bool
    tables: list[str]
    functions: list[str]
    refused: list[str]
    unlogged: list[str]


class _Setting(NamedTuple):
    value: str
    source: str

    @property
    def where(self) -> str:
        """Tell where it is set."""
        return _FROM.get(self.source, _IN_FILE)


def examine_postgres(backend: PostgresLease, exam: Examination) -> None:
    """Look at a database.

    Args:
        backend: Knows where it is.
        exam: The examination.
    """
    check_client(exam.findings, "psycopg2")
    visit: Visit[Link] = Visit(backend.connected, exam)
    looks = _Looks(backend, exam, visit)
    try:
        if visit.reaches(looks.now_ms):
            looks.all()
    finally:
        visit.close()


class _Looks:
    """The checks, one after the other on one connection."""

    def __init__(self, backend: PostgresLease, exam: Examination, visit: Visit[Link]) -> None:
        self._backend = backend
        self._names: Names = backend.names
        self._exam = exam
        self._findings: Findings = exam.findings
        self._visit = visit
        self._replica = False

    def all(self) -> None:
        findings = self._findings
        check_answers(self._exam, self.now_ms)
        with findings.checking("version"):
            self._check_server()
        with findings.checking("settings"):
            self._check_settings()
        with findings.checking("rights"):
            self._check_store()
        with findings.checking("pooler"):
            self._check_pooler()

    def now_ms(self) -> int:
        """Return the server's time."""
        return int(self._ask(_NOW)[0][0])

    def _ask(self, statement: str, values: object = None) -> list[tuple[Any, ...]]:
        link = self._visit.link()
        return link.ask(self._names.filled(statement), values, self._exam.call())

    # -- the server ------------------------------------------------------------------------------

    def _check_server(self) -> None:
        places = {
            "tables": self._names.prefixed(TABLES),
            "functions": self._names.prefixed(FUNCTIONS),
        }
        [row] = self._ask(sql_of("facts"), places)
        number, version, encoding, replica = int(str(row[0])), row[1], row[2], row[5]
        findings, oldest = self._findings, OLDEST_SERVER // 10_000
        if number < OLDEST_SERVER:
            findings.problem(
                "version",
                f"PostgreSQL {version}",
                "Schedulers refuse to start: it lacks what the library needs.",
                f"Update the server to version {oldest} or newer.",
            )
        else:
            findings.ok("version", f"PostgreSQL {version}")
        if encoding not in ENCODINGS:
            findings.problem(
                "encoding",
                f"the database is encoded as {encoding}",
                "Not every name can be written in it: schedulers refuse to start.",
                "Use a database that was created with ENCODING 'UTF8'.",
            )
        self._replica = bool(replica)
        if self._replica:
            findings.problem(
                "role",
                "this server is a replica (pg_is_in_recovery is true)",
                "It takes no writes: nothing can be claimed, renewed or settled here.",
                "Name the primary in the URL, or several hosts with "
                "target_session_attrs=read-write.",
            )
        else:
            findings.ok("role", "this server is a primary")

    def _check_settings(self) -> None:
        rows = self._ask(sql_of("settings"), {"names": list(_SETTINGS)})
        found = {str(name): _Setting(str(value), str(source)) for name, value, source in rows}
        self._check_read_only(found)
        self._check_commit(found)
        self._check_durability(found)
        limit = found.get("transaction_timeout")  # from PostgreSQL 17 on
        if limit is not None and 0 < int(limit.value) < _SHORT_MS:
            self._findings.warning(
                "limits",
                f"transaction_timeout is {limit.value} ms",
                "A call that is merely slow is ended by the server: busy moments become outages.",
                f"Raise it to at least {_SHORT_MS} ms for this user ({limit.where}).",
            )
        vacuum = found.get("autovacuum")
        if vacuum is not None and vacuum.value == "off":
            self._findings.warning(
                "autovacuum",
                "autovacuum is off",
                "Each run leaves dead rows behind, which slow every claim down more and more.",
                f"Set autovacuum = on ({vacuum.where}).",
            )

    def _check_read_only(self, found: dict[str, _Setting]) -> None:
        setting = found["default_transaction_read_only"]
        if setting.value == "on":
            self._findings.problem(
                "read-only",
                "default_transaction_read_only is on",
                "The server refuses every write: nothing can be claimed, renewed or settled.",
                f"Set it to off for this user; it comes from {setting.where}.",
            )
        elif not self._replica:
            self._findings.ok("read-only", "writes are allowed")

    def _check_commit(self, found: dict[str, _Setting]) -> None:
        commit, standbys = found["synchronous_commit"], found["synchronous_standby_names"]
        findings = self._findings
        if commit.value == "off":
            findings.problem(
                "commit",
                "synchronous_commit is off",
                "A crash of the server forgets the last moments (0.6 s by default): a run that "
                "was won then is won again, and is executed twice.",
                "ALTER ROLE ... SET synchronous_commit = on, for the user of the schedulers; it "
                f"comes from {commit.where}.",
            )
        else:
            findings.ok("commit", f"synchronous_commit is {commit.value}")
        [(replicas,)] = self._ask("SELECT count(*) FROM pg_catalog.pg_stat_replication")
        if not replicas or self._replica:
            return
        who = "1 replica follows" if replicas == 1 else f"{replicas} replicas follow"
        if commit.value in ("off", "local") or not standbys.value.strip():
            findings.warning(
                "replicas",
                f"{who}, and no commit waits",
                "A failover forgets what the replica had not received: a run that was won just "
                "before is won again, and is executed twice.",
                "Set synchronous_standby_names, and synchronous_commit = on, or fence what the "
                "handlers write.",
            )
        else:
            findings.ok("replicas", f"{who}, and commits wait")

    def _check_durability(self, found: dict[str, _Setting]) -> None:
        off = [name for name in ("fsync", "full_page_writes") if found[name].value == "off"]
        if not off:
            self._findings.ok("durability", "fsync and full_page_writes are on")
            return
        self._findings.problem(
            "durability",
            f"{' and '.join(off)} {'is' if len(off) == 1 else 'are'} off",
            "A crash of the host can destroy the database: runs are lost, or won again.",
            f"Set {' and '.join(f'{name} = on' for name in off)} ({_IN_FILE}).",
        )

    # -- the store -------------------------------------------------------------------------------

    def _check_store(self) -> None:
        tables, functions = self._names.prefixed(TABLES), self._names.prefixed(FUNCTIONS)
        [row] = self._ask(sql_of("rights"), {"tables": tables, "functions": functions})
        rights = _Rights(*row)
        missing = sorted(
            (set(tables) - set(rights.tables)) | (set(functions) - set(rights.functions))
        )
        if missing:
            self._tell_missing(rights, missing)
        if rights.tables:
            self._tell_rights(rights)
        if rights.unlogged:
            self._findings.problem(
                "tables",
                f"{', '.join(sorted(rights.unlogged))}: UNLOGGED",
                "A crash of the server empties them: every run that is owed is won again.",
                "ALTER TABLE ... SET LOGGED",
            )
        if self._names.prefixed(("meta",))[0] in rights.tables and rights.usage:
            with self._findings.checking("format"):
                rows = self._ask("SELECT value FROM {schema}.{prefix}meta WHERE name = 'format'")
                tell_format(self._findings, str(rows[0][0]) if rows else "")

    def _tell_missing(self, rights: _Rights, missing: list[str]) -> None:
        findings = self._findings
        if not rights.tables:
            found = f"there are no tables yet in schema {self._names.schema!r}"
            effect = "The first start of a scheduler makes them."
        else:
            found = f"missing: {', '.join(missing)}"
            effect = "The next start makes them anew; what was in a table is lost."
        advice = (
            "If schedulers have been at work, compare schema and table_prefix in the URL with "
            "those of the application."
        )
        if not rights.create:
            findings.problem(
                "tables",
                f"{found}, and this user may not make them",
                "No instance can start.",
                "A database administrator runs once what this prints, and grants the rights that "
                f"stand at its head: {self._names.command}. Or name a schema that this user may "
                "write to, with ?schema=... in the URL.",
            )
        elif not rights.tables:
            findings.note("tables", found, effect, advice)
        elif set(missing) & set(self._names.prefixed(TABLES)):
            findings.warning("tables", found, effect, advice)
        else:
            findings.note("tables", found, "The next start makes them: nothing is lost.")

    def _tell_rights(self, rights: _Rights) -> None:
        refused = [*([] if rights.usage else [f"USAGE on schema {self._names.schema}"])]
        refused += rights.refused
        if not refused:
            self._findings.ok("rights", "may read and write the tables and call the functions")
            return
        self._findings.problem(
            "rights",
            f"this user lacks: {', '.join(refused)}",
            "Nothing can be claimed, renewed or settled where a right is missing.",
            "GRANT what is missing to this user. The statements stand at the head of what this "
            f"prints: {self._names.command}",
        )

    # -- between here and there --------------------------------------------------------------------

    def _check_pooler(self) -> None:
        """Find out whether the connection leads to the server itself, and if not, what is kept.

        A server tells the number of its process when a connection begins. A pooler tells one that
        it made up. Whether it lends a session for a transaction or for good shows by who gets it.
        """
        link = self._visit.link()
        first = self._pid(link)
        if link.told_pid() == first:
            self._findings.ok("pooler", "none: the connection leads to the server itself")
            return
        other = self._backend.connected(self._exam.call())
        try:
            pids = [(first, self._pid(other))]
            pids += [(self._pid(link), self._pid(other)) for _ in range(2)]
            mine, others = {pid for pid, _ in pids}, {pid for _, pid in pids}
            shared = bool(mine & others) or len(mine) > 1 or len(others) > 1
            by_statement = shared and self._refuses_transactions(other)
        finally:
            other.close()
        self._tell_pooler(shared=shared, by_statement=by_statement)

    def _pid(self, link: Link) -> int:
        [(pid,)] = link.ask(_PID, None, self._exam.call())
        return int(pid)

    def _refuses_transactions(self, link: Link) -> bool:
        """Begin a transaction and end it, without a statement in it."""
        try:
            link.ask("BEGIN", None, self._exam.call())
        except (OutcomeUnknown, StoreRejected, StoreUnavailable):
            # Cut off, by who may have been in the midst of a restart: then the next line raises.
            self._ask(_PID)
            return True
        link.ask("ROLLBACK", None, self._exam.call())
        return False

    def _tell_pooler(self, *, shared: bool, by_statement: bool) -> None:
        if by_statement:
            self._findings.warning(
                "pooler",
                "a pooler in statement mode, such as pgbouncer with pool_mode = statement",
                "Each call of the library is one string of several statements, and this mode does "
                "not promise to keep them together: leases could be decided wrongly.",
                "Set pool_mode = transaction for this database or this user.",
            )
        elif shared:
            self._findings.ok(
                "pooler", "a pooler in transaction mode: it works, with enough sessions in its pool"
            )
        else:
            self._findings.note(
                "pooler",
                "a pooler that keeps a session for each client, such as pgbouncer with pool_mode = "
                "session",
                "It works. Each instance holds up to three of its sessions as long as it runs. "
                "When none is left, calls wait, and past their time-out that is an outage.",
                "Give the pool three sessions for each instance, or set pool_mode = transaction.",
            )
