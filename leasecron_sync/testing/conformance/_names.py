"""Cases about the names of jobs and namespaces, which may hold any characters."""

from __future__ import annotations

from leasecron_sync.model import JobSpan, LeaseReply, RunKey, RunState, Verdict
from leasecron_sync.testing.conformance._store import ALLOW, LeaseStore

SEPARATORS = (*":/.-_|{}[]()<>*?#$%&@!,;=+~^ \t\n\r\\\"'`\x1f\N{BULLET}", "::", "%3A")

ODD_NAMES = (
    "job",
    "Job",
    "JOB",
    "job ",
    " job",
    "job\n",
    "j\nob",
    "j\u0131b",  # dotless i
    "caf\u00e9",  # composed
    "cafe\u0301",  # decomposed: another name, though it looks the same
    "CAF\u00c9",
    "stra\u00dfe",
    "strasse",
    "\u212b",  # the sign for an angstrom
    "\u00c5",  # a letter that a normalisation makes of it
    "\ufb01",  # the ligature fi
    "fi",
    "\U0001f989",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\u202eright to left",
    "\u5b9a\u671f",
    "\ufeffwith a byte order mark",
    "{tag}",
    "a{b}c",
    "*",
    "?",
    "[a-z]",
    "%",
    "_",
    "'; DROP TABLE job; --",
    '"quoted"',
    "back\\slash",
    "..",
    "../../etc/passwd",
    "/",
    ":",
    "0",
    "00",
    "None",
    "null",
    "\x01\x7f",
    "x" * 200,
    "x" * 199,
    "x" * 199 + "y",
    "\U0001f989" * 200,
    "\u00e9" * 200,
)


class NameCases:
    """Two different names never meet in one record."""

    def test_odd_names_survive(self, store: LeaseStore) -> None:
        """CALL-6: unicode in every form, separators, 200 characters, and differences in case."""
        assert len(set(ODD_NAMES)) == len(ODD_NAMES)
        holder, asker = store.instance(), store.instance()
        now_ms = store.now_ms()
        runs = [RunKey(name, now_ms) for name in ODD_NAMES]
        leases = [holder.win(run) for run in runs]
        assert [lease.ref.key for lease in leases] == runs
        verdicts = [reply.verdict for reply in asker.ask_all(runs)]
        assert verdicts == [Verdict.HELD] * len(runs)
        assert set(store.records()) == set(runs)
        for lease in leases[::2]:
            assert holder.finish(lease).accepted
        spans = [JobSpan(name, now_ms, now_ms) for name in ODD_NAMES]
        states = [dict(found).get(now_ms) for found in asker.backend.states(spans)]
        expected = [RunState.FINISHED, RunState.RUNNING] * len(runs)
        assert states == expected[: len(runs)]
        store.lapse()
        assert set(asker.pending(*ODD_NAMES).keys) == set(runs[1::2])
        assert {job.job for job in asker.backend.jobs(1_000)} == set(ODD_NAMES)
        assert {record.key.job for record in asker.backend.history(None, 1_000)} == set(ODD_NAMES)

    def test_odd_names_are_registered_apart(self, store: LeaseStore) -> None:
        """CALL-6, REGISTER-2."""
        holder = store.instance()
        for number, name in enumerate(ODD_NAMES):
            holder.register(name, f"schedule {number}")
        store.advance(store.lease_ms)
        now_ms = store.now_ms()
        for number, name in enumerate(ODD_NAMES):
            assert holder.register(name, f"schedule {number}").owed_from_ms < now_ms

    def test_jobs_and_namespaces_are_kept_apart(self, store: LeaseStore) -> None:
        """CALL-6: a:b with the job c, and a with the job b:c, whatever the separator is."""
        now_ms = store.now_ms()
        for separator in SEPARATORS:
            left = store.instance(f"{store.namespace}{separator}b")
            right = store.instance(store.namespace)
            inner, outer = RunKey("c", now_ms), RunKey(f"b{separator}c", now_ms)
            lease = left.win(left.intend(inner, on_overlap=ALLOW))
            right.win(right.intend(outer, on_overlap=ALLOW))
            left.win(left.intend(outer, on_overlap=ALLOW))
            assert left.finish(lease).accepted
            seen = {record.key: record.state for record in left.backend.history(None, 100)}
            assert seen == {inner: RunState.FINISHED, outer: RunState.RUNNING}
            assert inner not in store.records()
            for instance in (left, right):
                instance.backend.close()

    def test_namespaces_share_nothing(self, store: LeaseStore) -> None:
        """CALL-6: records, jobs, tokens, overlap and pruning."""
        names = [store.namespace, f"{store.namespace} ", store.namespace.upper()]
        instances = [store.instance(name) for name in names]
        run = store.run(ago_ms=1)
        for instance in instances:
            instance.register()
            instance.finish(instance.win(run))
        store.advance(1)
        assert instances[0].backend.prune(0, 100).deleted == 1
        assert len(instances[0].backend.history(None, 10)) == 0
        for instance in instances[1:]:
            assert len(instance.backend.history(None, 10)) == 1
            assert instance.ask(run).verdict is Verdict.SETTLED
        lease = instances[1].win(store.run())
        assert not instances[2].pending().unsettled
        assert not instances[2].finish(lease).accepted
        assert instances[2].win(store.run()).attempt == 1
        store.lapse()
        for instance in instances:
            instance.backend.prune(0, 100)
        assert [len(instance.backend.jobs(10)) for instance in instances] == [1, 1, 1]

    def test_runs_of_a_job_are_kept_apart_by_the_millisecond(self, store: LeaseStore) -> None:
        """CLOCK-3: however far the scheduled times lie back or ahead."""
        holder = store.instance()
        now_ms = store.now_ms()
        times = [now_ms, now_ms - 1, 1, 0, -1, 2**31, 2**32, 2**41, 253_402_300_799_999]
        replies: list[LeaseReply] = []
        for scheduled_ms in times:
            claim = holder.intend(RunKey("job", scheduled_ms), due_ms=now_ms, on_overlap=ALLOW)
            replies.append(holder.ask(claim))
        assert [reply.verdict for reply in replies] == [Verdict.GRANTED] * len(times)
        assert sorted(run.scheduled_ms for run in store.records()) == sorted(times)
        assert holder.register().newest_ms == now_ms
