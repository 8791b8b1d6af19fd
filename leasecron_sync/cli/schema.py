"""The SQL that makes a store, for who may create tables where its users may not."""

from __future__ import annotations

import argparse
from typing import Final

from leasecron_sync.backends._sqlite_schema import schema_sql
from leasecron_sync.backends.postgres import PostgresLease
from leasecron_sync.backends.sqlite import SQLiteLease
from leasecron_sync.cli.output import CommandError, say
from leasecron_sync.cli.store import configure_url, given_backend

NAME: Final = "schema"
HELP: Final = "print the SQL that makes a store's tables, for a database administrator"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    configure_url(parser)


def command(options: argparse.Namespace) -> int:
    """Print it; nothing is connected."""
    backend = given_backend(options.url)
    if isinstance(backend, PostgresLease):
        text = backend.schema_sql()
    elif isinstance(backend, SQLiteLease):
        text = schema_sql()
    else:
        message = (
            f"{type(backend).__name__} keeps no tables: schema takes a URL such as "
            "postgresql://host/database or sqlite:///jobs.db"
        )
        raise CommandError(message)
    say(text.rstrip())
    return 0
