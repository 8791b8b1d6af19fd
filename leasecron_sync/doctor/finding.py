"""What the checks have found."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from leasecron_sync.backends._lanes import Deadline
from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.errors import OutcomeUnknown, StoreError, StoreUnavailable

_logger = logging.getLogger("leasecron_sync.doctor")


class Level(Enum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"  # worth knowing; nothing has to be done
    WARNING = "warning"  # a rare event may lose or double runs, or hold them up
    PROBLEM = "problem"  # it does not work, or an ordinary event loses or doubles runs


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: How much it matters.
        check: What was looked at, in a word or two that stay the same.
        found: What is the case.
        effect: What can happen because of it.
        advice: What to do.
        measured: Numbers by their names.
    """

    level: Level
    check: str
    found: str
    effect: str = ""
    advice: str = ""
    measured: Mapping[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        assert self.level is Level.OK or self.effect, f"{self.check}: what can happen?"
        serious = self.level in (Level.WARNING, Level.PROBLEM)
        assert not serious or self.advice, f"{self.check}: what to do?"


class Findings:
    """Takes findings in, from the thread that looks, while another one may read them.

    Attributes:
        under_way: Name of the check that is under way.
    """

    def __init__(self) -> None:
        self._found: list[Finding] = []
        self.under_way = ""

    def all(self) -> list[Finding]:
        """Return what was found so far."""
        return list(self._found)

    def ok(self, check: str, found: str, measured: Mapping[str, int] = {}) -> None:
        """Note that something is as it should be."""
        self._found.append(Finding(Level.OK, check, found, measured=measured))

    def note(self, check: str, found: str, effect: str, advice: str = "") -> None:
        """Note what is worth knowing."""
        self._found.append(Finding(Level.NOTE, check, found, effect, advice))

    def warning(self, check: str, found: str, effect: str, advice: str) -> None:
        """Note what can do harm after a rare event."""
        self._found.append(Finding(Level.WARNING, check, found, effect, advice))

    def problem(self, check: str, found: str, effect: str, advice: str) -> None:
        """Note what does not work, or does harm after an ordinary event."""
        self._found.append(Finding(Level.PROBLEM, check, found, effect, advice))

    def add(self, finding: Finding) -> None:
        """Take a finding in."""
        self._found.append(finding)

    @contextmanager
    def checking(self, check: str) -> Generator[None, None, None]:
        """Do one check; whatever it ends with, the next ones are done as well."""
        self.under_way = check
        try:
            yield
        except (StoreUnavailable, OutcomeUnknown) as error:
            self.problem(
                check,
                f"no answer: {error}",
                "The store answered before, and not to this: an instance would take it for an "
                "outage.",
                "Call this command again. If that stays so, look into the server's log.",
            )
        except StoreError as error:
            self.warning(
                check,
                f"could not be checked: {error}",
                "Nobody knows whether this is as it should be.",
                "Put right what the reason says, or look by hand.",
            )
        except OSError as error:
            self.problem(
                check,
                f"could not be checked: {error.strerror or type(error).__name__}",
                "Nobody knows whether this is as it should be, and a scheduler of this user would "
                "meet the same.",
                "Put right what the reason says, or call this command as the application's user.",
            )
        except Exception as error:  # of a client library, or a fault of ours
            # The text is not shown: of a client library it may hold a password.
            _logger.debug("a check failed check=%r", check, exc_info=True)
            self.problem(
                check,
                f"the check itself failed ({type(error).__name__})",
                "Nobody knows whether this is as it should be.",
                "Look by hand, and report it as a fault of leasecron-sync.",
            )


@dataclass(frozen=True)
class Examination:
    """What every check is given.

    Attributes:
        settings: As a scheduler would be given them.
        findings: Where findings go.
        deadline: When all has to be done.
    """

    settings: BackendSettings
    findings: Findings
    deadline: Deadline

    def call(self) -> Deadline:
        """Return the deadline of one call."""
        return Deadline(min(self.settings.call_timeout_ms, self.deadline.left_ms()))
