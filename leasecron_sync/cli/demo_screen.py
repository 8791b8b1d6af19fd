"""What the demo shows while it goes on: a table that is redrawn in place, or plain lines."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple, Optional, Protocol, TextIO

from leasecron_sync.cli.demo_facts import Kill, Note
from leasecron_sync.cli.output import human, say
from leasecron_sync.run import moment

_BAR: Final = 8
_FIRST_COLUMN: Final = 12
_COLUMN: Final = 22
_MOST_ROWS: Final = 13
_AROUND_ROWS: Final = 9
_LEAST_HEIGHT: Final = 15
_LEAST_WIDTH: Final = 78
_REDRAW_MS: Final = 100

_BOLD: Final = "1"
_FAINT: Final = "2"
_GREEN: Final = "1;32"
_RED: Final = "1;31"
_INSTANCES: Final = ("36", "33", "35", "34")


class Screen(Protocol):
    """Shows the demo as it goes on."""

    def note(self, note: Note) -> None:
        """Show what an instance wrote."""
        ...

    def kill(self, kill: Kill, pid: int, runs: Sequence[int]) -> None:
        """Show that an instance was killed, in the middle of these runs."""
        ...

    def refresh(self, now_ms: int) -> None:
        """Show how the time goes by."""
        ...

    def close(self, now_ms: int, until_ms: Optional[int]) -> None:
        """Show the last state and give the terminal back.

        Args:
            now_ms: The time.
            until_ms: Last scheduled time that the summary looks at, if there will be one.
        """
        ...


class Facts(NamedTuple):
    """What the screen tells of the demo.

    Attributes:
        pids: Process of each instance.
        job: Name of the job.
        period_s: Distance of its scheduled times.
        body_ms: How long its handler works.
    """

    pids: dict[str, int]
    job: str
    period_s: int
    body_ms: int


def make_screen(facts: Facts, started_ms: int) -> Screen:
    """Return a table for a terminal that can show one, plain lines for everything else."""
    stream = sys.stdout
    size = shutil.get_terminal_size()
    can_draw = (
        stream.isatty()
        and os.environ.get("TERM", "dumb") != "dumb"
        and size.columns >= _LEAST_WIDTH
        and size.lines >= _LEAST_HEIGHT
    )
    if not can_draw:
        return Lines(facts)
    blocks = (stream.encoding or "").lower().replace("-", "") == "utf8"
    look = Look(colour=not os.environ.get("NO_COLOR"), blocks=blocks)
    rows = min(_MOST_ROWS, size.lines - 1 - _AROUND_ROWS)
    return LiveTable(Board(facts, look, rows, started_ms), stream)


def clock_time(scheduled_ms: int) -> str:
    """Return the time of day of an instant, in UTC."""
    return _time(moment(scheduled_ms))


def _time(instant: datetime) -> str:
    return instant.strftime("%H:%M:%S")


class Story:
    """Says in a sentence what happened.

    Args:
        facts: What is known beforehand.
    """

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._kill: Optional[Kill] = None
        self._left: set[int] = set()

    def of_note(self, note: Note) -> str:
        """Return a sentence for what an instance wrote; empty when there is nothing to say."""
        run = f"{self._facts.job} {clock_time(note.scheduled_ms)}"
        if note.event == "ready":
            return f"{note.instance} is ready (pid {self._facts.pids[note.instance]})"
        if note.event == "began" and note.attempt > 1:
            return f"{note.instance} took {run} over as attempt {note.attempt}{self._since(note)}"
        if note.event == "began":
            return f"{note.instance} runs {run}"
        if note.event == "finished":
            attempt = f", attempt {note.attempt}" if note.attempt > 1 else ""
            return f"{note.instance} finished {run}{attempt}"
        if note.event == "lost":
            return f"{note.instance} lost its lease of {run}: this machine is busy"
        return ""

    def of_kill(self, kill: Kill, pid: int, runs: Sequence[int]) -> str:
        """Return a sentence for the end of an instance."""
        self._kill, self._left = kill, set(runs)
        named = " and ".join(f"{self._facts.job} {clock_time(ms)}" for ms in runs)
        where = f" in the middle of {named}" if runs else ""
        return f"{kill.instance} (pid {pid}) is killed with SIGKILL{where}"

    def _since(self, note: Note) -> str:
        if self._kill is None or note.scheduled_ms not in self._left:
            return ""
        return f", {human(note.at_ms - self._kill.at_ms)} after the kill"


class Lines:
    """Writes one line per event.

    Args:
        facts: What is known beforehand.
    """

    def __init__(self, facts: Facts) -> None:
        self._story = Story(facts)

    def note(self, note: Note) -> None:
        """Write a line."""
        self._write(self._story.of_note(note))

    def kill(self, kill: Kill, pid: int, runs: Sequence[int]) -> None:
        """Write a line."""
        self._write(self._story.of_kill(kill, pid, runs))

    def refresh(self, now_ms: int) -> None:
        """Nothing happened, nothing is written."""

    def close(self, now_ms: int, until_ms: Optional[int]) -> None:
        """Nothing is left to write."""

    @staticmethod
    def _write(sentence: str) -> None:
        if sentence:
            say(sentence)
            sys.stdout.flush()


class Look(NamedTuple):
    """What the terminal can show.

    Attributes:
        colour: True for colours.
        blocks: True when it shows block characters, else ``#``.
    """

    colour: bool
    blocks: bool


@dataclass
class Cell:
    """One attempt in the table.

    Attributes:
        began_ms: When it began.
        attempt: Its number.
        state: running, finished, lost, or killed.
        ended_ms: When it ended, if it did.
    """

    began_ms: int
    attempt: int
    state: str = "running"
    ended_ms: Optional[int] = None


class Board:
    """The table: a line per scheduled time, a column per instance.

    Args:
        facts: What is known beforehand.
        look: What the terminal can show.
        rows: How many scheduled times are shown.
        started_ms: When the demo began.
    """

    def __init__(self, facts: Facts, look: Look, rows: int, started_ms: int) -> None:
        self._facts = facts
        self._look = look
        self._row_number = rows
        self._started_ms = started_ms
        self._story = Story(facts)
        self._messages: list[str] = []
        self._rows: dict[int, dict[str, Cell]] = {}
        self._states = dict.fromkeys(facts.pids, "starting")
        self._finished = dict.fromkeys(facts.pids, 0)
        self._colours = dict(zip(facts.pids, _INSTANCES))

    def note(self, note: Note) -> None:
        """Enter what an instance wrote."""
        if note.event == "ready":
            self._states[note.instance] = "alive"
        elif note.event == "began":
            row = self._rows.setdefault(note.scheduled_ms, {})
            row[note.instance] = Cell(note.at_ms, note.attempt)
            if note.attempt > 1:
                self._messages.append(self._story.of_note(note))
        elif note.event in ("finished", "lost"):
            cell = self._rows.get(note.scheduled_ms, {}).get(note.instance)
            if cell is not None:
                cell.state, cell.ended_ms = note.event, note.at_ms
            self._finished[note.instance] += note.event == "finished"

    def kill(self, kill: Kill, pid: int, runs: Sequence[int]) -> None:
        """Enter the end of an instance."""
        self._states[kill.instance] = "KILLED"
        self._messages.append(self._story.of_kill(kill, pid, runs))
        for scheduled_ms in runs:
            cell = self._rows.get(scheduled_ms, {}).get(kill.instance)
            if cell is not None:
                cell.state, cell.ended_ms = "killed", kill.at_ms

    def leave_out_after(self, until_ms: int) -> None:
        """Show no later scheduled times: their runs have just begun."""
        self._rows = {ms: row for ms, row in self._rows.items() if ms <= until_ms}

    def lines(self, now_ms: int) -> list[str]:
        """Return the table as it is at a moment; always the same number of lines."""
        facts, paint = self._facts, self._paint
        elapsed = f"{(now_ms - self._started_ms) / 1000:5.1f} s"
        title = f"{len(facts.pids)} processes, one schedule, one SQLite file"
        every = "every second" if facts.period_s == 1 else f"every {facts.period_s} s"
        takes = f"takes {facts.body_ms / 1000:.1f} s"
        lines = [
            paint(" leasecron-sync demo", _BOLD) + f"   {title:<48}{elapsed}",
            f" The job {facts.job!r} is due {every} and {takes}. Who runs it when?",
            "",
            self._heading("scheduled", {n: f"{n}  pid {pid}" for n, pid in facts.pids.items()}),
            self._counts(),
        ]
        shown = sorted(self._rows)[-self._row_number :]
        lines += [self._row(scheduled_ms, now_ms) for scheduled_ms in shown]
        lines += [""] * (self._row_number - len(shown) + 1)
        messages = self._messages[-3:]
        lines += [f" {message[: _LEAST_WIDTH - 2]}" for message in messages]
        lines += [""] * (3 - len(messages))
        return lines

    def _heading(self, first: str, texts: dict[str, str]) -> str:
        cells = [
            self._paint(text.ljust(_COLUMN), f"1;{self._colours[name]}")
            for name, text in texts.items()
        ]
        return f" {first:<{_FIRST_COLUMN - 1}}{''.join(cells)}".rstrip()

    def _counts(self) -> str:
        cells: list[str] = []
        for name, state in self._states.items():
            style = _RED if state == "KILLED" else _FAINT
            number = self._finished[name]
            text = f"{state}, {number} {'run' if number == 1 else 'runs'}"
            cells.append(self._paint(text.ljust(_COLUMN), style))
        return f" {'time (UTC)':<{_FIRST_COLUMN - 1}}{''.join(cells)}".rstrip()

    def _row(self, scheduled_ms: int, now_ms: int) -> str:
        cells = [f" {clock_time(scheduled_ms):<{_FIRST_COLUMN - 1}}"]
        for name in self._facts.pids:
            cell = self._rows[scheduled_ms].get(name)
            cells.append(" " * _COLUMN if cell is None else self._cell(cell, name, now_ms))
        return "".join(cells).rstrip()

    def _cell(self, cell: Cell, name: str, now_ms: int) -> str:
        until_ms = now_ms if cell.ended_ms is None else cell.ended_ms
        done = max(0, (until_ms - cell.began_ms) * _BAR // self._facts.body_ms)
        full, rest = ("█", "░") if self._look.blocks else ("#", ".")
        attempt = f"attempt {cell.attempt}" if cell.attempt > 1 else ""
        if cell.state == "finished":
            bar, word = full * _BAR, attempt or "done"
        elif cell.state == "running":
            # The last piece is filled when the store has accepted the end.
            done = min(done, _BAR - 1)
            bar, word = full * done + rest * (_BAR - done), attempt or "runs"
        else:
            done = min(done, _BAR - 1)
            bar = full * done + "x" + " " * (_BAR - 1 - done)
            word = "KILLED" if cell.state == "killed" else "lease lost"
        style = self._colours[name]
        if cell.state == "killed":
            style = _RED
        elif cell.attempt > 1:
            style = _GREEN
        text = f"{bar} {word}"
        return self._paint(text, style) + " " * (_COLUMN - len(text))

    def _paint(self, text: str, style: str) -> str:
        if not style or not self._look.colour:
            return text
        return f"\x1b[{style}m{text}\x1b[0m"


class LiveTable:
    """Redraws the table in place.

    Args:
        board: The table.
        stream: The terminal.
    """

    def __init__(self, board: Board, stream: TextIO) -> None:
        self._board = board
        self._stream = stream
        self._height = 0
        self._drawn_ms: Optional[int] = None
        self._stream.write("\x1b[?25l")  # no cursor

    def note(self, note: Note) -> None:
        """Enter it; it is drawn next time."""
        self._board.note(note)

    def kill(self, kill: Kill, pid: int, runs: Sequence[int]) -> None:
        """Enter it; it is drawn next time."""
        self._board.kill(kill, pid, runs)

    def refresh(self, now_ms: int) -> None:
        """Draw, unless that was just done."""
        if self._drawn_ms is None or now_ms - self._drawn_ms >= _REDRAW_MS:
            self._draw(now_ms)

    def close(self, now_ms: int, until_ms: Optional[int]) -> None:
        """Draw the last state and show the cursor again."""
        if until_ms is not None:
            self._board.leave_out_after(until_ms)
        self._draw(now_ms)
        self._stream.write("\x1b[?25h")
        self._stream.flush()

    def _draw(self, now_ms: int) -> None:
        lines = self._board.lines(now_ms)
        back = f"\x1b[{self._height}A" if self._height else ""
        self._stream.write(back + "".join(f"\r{line}\x1b[K\n" for line in lines))
        self._stream.flush()
        self._height, self._drawn_ms = len(lines), now_ms
