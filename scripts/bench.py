#!/usr/bin/env python3
"""Measure leasecron_sync beside the raw store, and print a table.

scripts/bench.py [URL ...]          a temporary SQLite file when no URL is given
    --services                      that file, and new servers, one after the other: for leases each
                                    PostgreSQL, Redis and Valkey that this machine has, and for each
                                    way to claim the newest server
    --only NAME                     one measurement; may be repeated
    --quick                         half a minute: shows that it works, the figures say little
    --json FILE                     write the figures to a file as well

A URL is what connect() takes, such as sqlite:///bench.db for leases or nats://localhost for claims.
Use a store made for the purpose: records of runs stay in it, in namespaces of their own. Everything
takes about four minutes a store, and deserves a machine with nothing else to do. What makes no
sense for claims is measured with leases only, and the cost of gates with RabbitMQ only. The servers
of --services have their own defaults (PostgreSQL forces what it was told to the disk, Redis and
Valkey make a snapshot now and then), keep their data on the disk, and are removed. The status is 1
when a run was executed twice or not at all, an instance failed, or a server could not be started.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any, Callable, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout

from leasecron_sync import LeasecronError
from scripts import _bench_claims as claims
from scripts._bench_claim_stores import ClaimStore
from scripts._bench_crew import BenchError
from scripts._bench_figures import (
    Figure,
    Scale,
    Told,
    measure_batches,
    measure_history,
    measure_singles,
    measure_start,
)
from scripts._bench_fleet import (
    measure_delay,
    measure_hand_over,
    measure_many,
    measure_takeover,
    measure_together,
)
from scripts._bench_gates import measure_gates
from scripts._bench_sqlite import TemporarySQLite
from scripts._bench_store import AnyStore, Store
from scripts._bench_stores import any_store_of
from scripts._environment import use_environment

QUICK = Scale(
    rounds=3,
    singles=10,
    batch=100,
    batches=2,
    history=5_000,
    instances=2,
    each_second=8,
    seconds=3,
    together=100,
    lead_s=3,
    many=500,
    many_lead_s=3,
    many_step_s=1,
    trials=2,
    lease_ms=500,
    gates=(0, 100, 300),
)
MEASUREMENTS: dict[str, Callable[[Told[Store]], list[Figure]]] = {
    "singles": measure_singles,
    "batches": measure_batches,
    "history": measure_history,
    "start": measure_start,
    "delay": measure_delay,
    "together": measure_together,
    "many": measure_many,
    "takeover": measure_takeover,
    "hand-over": measure_hand_over,
}
"""Of leases."""

CLAIM_MEASUREMENTS: dict[str, Callable[[Told[ClaimStore]], list[Figure]]] = {
    "singles": claims.measure_singles,
    "batches": claims.measure_batches,
    "lost": claims.measure_lost,
    "delay": measure_delay,
    "together": measure_together,
    "gates": measure_gates,
}
ALL = tuple(dict.fromkeys([*MEASUREMENTS, *CLAIM_MEASUREMENTS]))
OF_LEASES = {
    "history": "a claim leaves no record of its run",
    "start": "nothing is registered with a claim",
    "many": "of leases; together tells how claims fare",
    "takeover": "nobody takes over a run that was claimed",
    "hand-over": "a claim cannot be handed over",
}
OF_CLAIMS = {"lost": "of claims", "gates": "RabbitMQ has them"}
Place = Callable[[], AbstractContextManager[AnyStore]]
BETWEEN_PROCESSES = ("start", "delay", "together", "many", "takeover", "hand-over")
NAME_WIDTH = 46
NOTE_WIDTH = 96


def machine() -> dict[str, str]:
    """Return what a reader of the figures should know of the place where they were taken."""
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    return {
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processors": str(os.cpu_count()),
        "load before": load,
    }


def names_of(store: AnyStore, only: Optional[Sequence[str]]) -> list[str]:
    """Return what is measured on a store: what was asked for, or what its kind has."""
    if only:
        return [name for name in ALL if name in only]
    if not isinstance(store, ClaimStore):
        return [*MEASUREMENTS]
    return [name for name in CLAIM_MEASUREMENTS if name != "gates" or store.broker is not None]


def why_not(store: AnyStore, name: str) -> str:
    """Return why something cannot be measured on a store, or nothing."""
    if name in (OF_LEASES if isinstance(store, ClaimStore) else OF_CLAIMS):
        return OF_LEASES.get(name) or OF_CLAIMS[name]
    if isinstance(store, ClaimStore) and name == "gates" and not store.has_gates:
        return OF_CLAIMS[name]
    if name in BETWEEN_PROCESSES and not store.between_processes:
        return "no other process sees it"
    return ""


def measure(store: AnyStore, names: Sequence[str], scale: Scale) -> list[tuple[str, Figure]]:
    """Do the measurements on one store."""
    found: list[tuple[str, Figure]] = []
    for name in names:
        reason = why_not(store, name)
        if reason:
            found.append((name, Figure(name, "not measured", note=reason)))
            continue

        def progress(text: str, name: str = name) -> None:
            print(f"{name}: {text}", file=sys.stderr, flush=True)

        progress("begins")
        namespace = f"bench-{name}-{secrets.token_hex(4)}"
        if isinstance(store, ClaimStore):
            figures = CLAIM_MEASUREMENTS[name](Told(store, scale, namespace, progress))
        else:
            assert isinstance(store, Store)
            figures = MEASUREMENTS[name](Told(store, scale, namespace, progress))
        found += [(name, figure) for figure in figures]
    return found


def show(title: str, facts: dict[str, str], found: Sequence[tuple[str, Figure]]) -> None:
    """Print the figures of one store."""
    print(f"\n{title}")
    print(", ".join(f"{name}: {value}" for name, value in facts.items()))
    print(f"\n{'':{NAME_WIDTH}}  {'figure':34}  {'floor':16}  {'ratio':>6}  wanted")
    for _name, figure in found:
        first, *rest = textwrap.wrap(figure.name, NAME_WIDTH)
        ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
        line = f"{first:{NAME_WIDTH}}  {figure.value:34}  {figure.floor:16}  {ratio:>6}"
        print(f"{line}  {figure.wanted}".rstrip())
        for part in rest:
            print(part)
        for part in textwrap.wrap(figure.note, NOTE_WIDTH):
            print(f"    {part}")


def parsed(arguments: Optional[Sequence[str]]) -> argparse.Namespace:
    """Return the arguments; wrong ones end the program with one line and status 2."""
    head, _blank, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=head, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("urls", nargs="*", metavar="URL")
    parser.add_argument("--only", action="append", metavar="NAME", help=", ".join(ALL))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--services", action="store_true")
    parser.add_argument("--json", metavar="FILE", type=Path)
    options = parser.parse_args(arguments)
    for name in options.only or ():
        if name not in ALL:
            parser.error(f"--only {name}: no such measurement, use one of {', '.join(ALL)}")
    if options.services and options.urls:
        parser.error("--services starts servers of its own: leave the URLs out")
    problem = unwritable(options.json) if options.json is not None else ""
    if problem:
        parser.error(f"--json {options.json}{problem}")
    try:
        options.places = {
            str(store): closing_of(store) for store in map(any_store_of, options.urls)
        }
    except (ValueError, LeasecronError) as error:
        parser.error(f"URL: {error}")
    return options


def unwritable(path: Path) -> str:
    """Return why a file cannot be written, or nothing; known before anything is measured."""
    if not path.parent.is_dir():
        return ": its folder does not exist, make it or name another"
    if path.is_dir():
        return " is a folder: name a file"
    is_new = not path.exists()
    try:
        with path.open("a", encoding="utf-8"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        return f" cannot be written ({error.strerror}): name another file"
    return ""


def closing_of(store: AnyStore) -> Place:
    return lambda: closing(store)


def places_of(options: argparse.Namespace) -> Mapping[str, Place]:
    """Return what gives each store, by its name."""
    if options.services:
        from scripts import _bench_services  # noqa: PLC0415 - of the tests, if wanted

        wanted = options.only or ALL
        found: dict[str, Place] = {}
        if any(name in MEASUREMENTS for name in wanted):
            found |= _bench_services.places()
        if any(name in CLAIM_MEASUREMENTS for name in wanted):
            found |= _bench_services.claim_places()
        return found
    return options.places or {"a temporary SQLite file": lambda: closing(TemporarySQLite())}


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Measure what is asked for; return the exit status."""
    options = parsed(arguments)
    scale = QUICK if options.quick else Scale()
    written: list[dict[str, Any]] = []
    status = 0
    for label, place in places_of(options).items():
        facts = machine()
        try:
            with place() as store:
                facts |= store.facts() | store.known
                found = measure(store, names_of(store, options.only), scale)
        except (BenchError, LeasecronError) as error:
            print(f"bench.py: {label}: {error}", file=sys.stderr)
            status = 1
            continue
        except KeyboardInterrupt:
            print("bench.py: interrupted", file=sys.stderr)
            return 130
        show(str(store), facts, found)
        figures = [{"measurement": name, **figure._asdict()} for name, figure in found]
        written.append({"store": str(store), "facts": facts, "figures": figures})
    if options.json is not None:
        try:
            options.json.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            print(f"bench.py: --json {options.json}: {error.strerror}", file=sys.stderr)
            return 1
    return status


if __name__ == "__main__":
    use_environment()
    sys.exit(main())
