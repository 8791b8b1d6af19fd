"""What makes a schema of a PostgreSQL database a store, and the texts of its statements."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Optional

from leasecron_sync.backends._lanes import Deadline
from leasecron_sync.backends._postgres_link import Link
from leasecron_sync.errors import StoreRejected, StoreUnavailable, StoreUnsupported
from leasecron_sync.model import STORE_FORMAT

TABLES = ("meta", "space", "job", "run")
FUNCTIONS = (
    "meet_v1",
    "claim_v1",
    "renew_v1",
    "settle_v1",
    "register_v1",
    "pending_v1",
    "states_v1",
    "prune_v1",
)
"""What this version calls. A number rises when a function changes after a release, so that older
and newer versions find their own in one store."""

OLDEST_SERVER = 130_000
ENCODINGS = ("UTF8", "SQL_ASCII")
"""Of a database that keeps every name apart; the second one takes bytes as they come."""

LOCK = 0x6C6561736563726F  # "leasecro": one lock of the database, for all that is made here
MAX_IDENTIFIER = 63
MAX_PREFIX = 30


@dataclass(frozen=True)
class Names:
    """Where a store lies in its database.

    Attributes:
        schema: PostgreSQL's schema.
        prefix: What the names of tables and functions begin with.
    """

    schema: str = "public"
    prefix: str = "leasecron_"

    def __post_init__(self) -> None:
        if not re.fullmatch(rf"[A-Za-z_][A-Za-z0-9_-]{{0,{MAX_IDENTIFIER - 1}}}", self.schema):
            message = (
                f"schema {self.schema!r} must be 1 to {MAX_IDENTIFIER} letters, digits, '_' and "
                "'-', and must not begin with a digit"
            )
            raise ValueError(message)
        if not re.fullmatch(rf"([a-z_][a-z0-9_]{{0,{MAX_PREFIX - 1}}})?", self.prefix):
            message = (
                f"table_prefix {self.prefix!r} must be up to {MAX_PREFIX} lower-case letters, "
                "digits and '_', and must not begin with a digit"
            )
            raise ValueError(message)

    @property
    def command(self) -> str:
        """The command that prints the SQL which makes the store; its URL needs no server."""
        prefix = "" if self.prefix == Names.prefix else f"&table_prefix={self.prefix}"
        return f"leasecron-sync schema 'postgresql://?schema={self.schema}{prefix}'"

    def filled(self, text: str) -> str:
        """Put the names into a text of SQL."""
        return text.replace("{schema}", f'"{self.schema}"').replace("{prefix}", self.prefix)

    def prefixed(self, names: tuple[str, ...]) -> list[str]:
        """Return the names of these tables or functions."""
        return [f"{self.prefix}{name}" for name in names]


@cache
def sql_of(name: str) -> str:
    """Return the text of a file in ``_sql/postgres``."""
    from importlib import resources  # late: it is slow to import, and needed once

    folder = resources.files("leasecron_sync.backends") / "_sql" / "postgres"
    return (folder / f"{name}.sql").read_text(encoding="utf-8")


def schema_sql(names: Names) -> str:
    """Return the SQL that an administrator would run to make the store."""
    tables = ", ".join(f"{{schema}}.{name}" for name in names.prefixed(TABLES))
    head = (
        f"-- Tables and functions of leasecron_sync, store format {STORE_FORMAT}, for PostgreSQL "
        f"{OLDEST_SERVER // 10_000} or newer. What is there\n"
        "-- already is left as it is. A role that uses the store needs no right to create, only:\n"
        "--   GRANT USAGE ON SCHEMA {schema} TO role;\n"
        f"--   GRANT SELECT, INSERT, UPDATE, DELETE ON {tables} TO role;\n"
        "-- and EXECUTE on the functions, which everybody has unless it was revoked.\n"
        "BEGIN;\n"
        f"DO $$ BEGIN PERFORM pg_advisory_xact_lock({LOCK}); END $$;\n"
    )
    parts = [head, sql_of("schema"), sql_of("meta"), *map(sql_of, FUNCTIONS), "COMMIT;\n"]
    if names.schema != "public":
        parts.insert(1, "CREATE SCHEMA IF NOT EXISTS {schema};\n")
    return names.filled("\n".join(parts))


# Whatever functions of the same names the user's search path leads to.
_PLAIN = "SET LOCAL search_path = pg_catalog; "

_META = ", ".join(
    f"(SELECT m.value FROM {{schema}}.{{prefix}}meta m WHERE m.name = '{name}')"
    for name in ("format", "store_id")
)


class Facts(NamedTuple):
    """What a server and its store say of themselves, in the order of ``facts.sql``."""

    number: int
    version: str
    encoding: str
    synchronous_commit: str
    fsync: str
    replica: bool
    store_ms: int
    has_schema: bool
    tables: int
    functions: int
    format: Optional[str] = None
    store_id: Optional[str] = None

    @property
    def is_complete(self) -> bool:
        """Tell whether nothing is missing; of another format only the number is known."""
        if self.format not in (None, str(STORE_FORMAT)):
            return True
        whole = self.tables == len(TABLES) and self.functions == len(FUNCTIONS)
        return whole and self.format is not None and self.store_id is not None


def met(link: Link, names: Names, label: str, *, make: bool, deadline: Deadline) -> Facts:
    """Look at the store behind a new connection, and make what is missing.

    Args:
        link: The connection.
        names: Where it lies.
        label: Names the store in errors.
        make: Whether to make it; a command that only reads leaves the database as it is.
        deadline: Of the whole.

    Raises:
        StoreRejected: There is none, and it is not to be made.
        StoreUnsupported: There can be none, or it is one of another version.
        StoreError: No answer.
    """
    facts = _looked(link, names, deadline)
    _check_server(facts, label)
    if not facts.is_complete:
        if not make:
            message = (
                f"{label} has no tables for this version in schema {names.schema!r} yet: a "
                "scheduler's start makes them, where its user may; if schedulers are at work "
                "already, their URL names another one (?schema=...)"
            )
            raise StoreRejected(message)
        problem = _made(link, names, facts, deadline)
        facts = _looked(link, names, deadline)
        if not facts.is_complete:
            reason = f" ({problem})" if problem else ""
            message = (
                f"{label} has no complete set of tables and functions in schema {names.schema!r}, "
                f"and its user may not make them{reason}: let a user who may run what this "
                f"prints, {names.command}; or name a schema of its own in the URL (?schema=...)"
            )
            raise StoreUnsupported(message)
    if facts.format != str(STORE_FORMAT):
        message = (
            f"{label} has store format {facts.format}, this version of leasecron_sync reads "
            f"{STORE_FORMAT}: use a version that knows it"
        )
        raise StoreUnsupported(message)
    return facts


def _looked(link: Link, names: Names, deadline: Deadline) -> Facts:
    """Look in one round trip where there is a store, in one more where there is none."""
    values = {"tables": names.prefixed(TABLES), "functions": names.prefixed(FUNCTIONS)}
    facts = sql_of("facts")
    try:
        whole = f"{_PLAIN}SELECT f.*, {_META} FROM ({facts}) f"
        [row] = link.ask(names.filled(whole), values, deadline)
    except StoreUnavailable:
        if not link.misses_something:
            raise
        [row] = link.ask(names.filled(_PLAIN + facts), values, deadline)
    return Facts(*row)


def _check_server(facts: Facts, label: str) -> None:
    if facts.number < OLDEST_SERVER:
        message = (
            f"{label} is PostgreSQL {facts.version}: version {OLDEST_SERVER // 10_000} or a newer "
            "one is needed"
        )
        raise StoreUnsupported(message)
    if facts.encoding not in ENCODINGS:
        message = (
            f"the database of {label} is encoded as {facts.encoding}, which not every name can be "
            "written in: use a database with ENCODING 'UTF8'"
        )
        raise StoreUnsupported(message)


def _made(link: Link, names: Names, facts: Facts, deadline: Deadline) -> str:
    """Make what is missing; return why not, where the user may not."""
    parts = [f"SELECT pg_advisory_xact_lock({LOCK})", "SET LOCAL client_min_messages = warning"]
    if not facts.has_schema:
        parts.append("CREATE SCHEMA IF NOT EXISTS {schema}")
    if facts.tables < len(TABLES):
        parts.append(sql_of("schema"))
    parts.append(sql_of("meta"))
    if facts.functions < len(FUNCTIONS):
        parts.extend(sql_of(name) for name in FUNCTIONS)
    try:
        link.ask(names.filled(";\n".join(parts)), None, deadline)
    except StoreRejected as error:
        return str(error)  # unless somebody else has made them meanwhile
    return ""
