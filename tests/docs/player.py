"""Plays the examples of one document, in a process and a working directory of their own.

The steps come as JSON from ``test_examples.py``. Python blocks share one namespace, shell blocks
one shell that lasts until the end, so that a program started in one block can be killed in a later
one. What a block writes is held against the output that the document shows.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, Optional, TextIO, cast

from leasecron_sync.clock import SystemClock

OUTPUT_LIMIT_S = 30.0
"""The longest that an output which the document shows may take to appear."""

# What differs from one time to the next: ids of instances, durations, and every number of two
# digits or more. Numbers of one digit, such as an attempt, are compared.
_VARYING = re.compile(r"\b[0-9a-f]{12}\b|\d+(?:\.\d+)? m?s\b|\d\d+")


def pattern_of(line: str, *, exact: bool) -> re.Pattern[str]:
    """Make a pattern of a line that a document shows; ``...`` stands for anything."""
    text, at = line.strip(), 0
    parts: list[str] = []
    for found in () if exact else _VARYING.finditer(text):
        parts.append(_literally(text[at : found.start()]))
        shown = found.group()
        if shown.endswith("s"):
            parts.append(r"\d+(?:\.\d+)? (?:ms|s)")
        else:
            parts.append("[0-9a-f]{12}" if len(shown) == 12 else r"\d+")
        at = found.end()
    parts.append(_literally(text[at:]))
    return re.compile("".join(parts))


def _literally(text: str) -> str:
    return re.sub(r"(?:\\ )+", r"\\s+", re.escape(text)).replace(r"\.\.\.", ".*")


class Heard:
    """Lines that a block has written so far, by whichever thread reads them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lines: list[str] = []
        self._ended = False

    def add(self, line: str) -> None:
        with self._changed:
            self._lines.append(line.rstrip("\n"))
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def clear(self) -> None:
        with self._changed:
            self._lines.clear()

    def text(self) -> str:
        with self._changed:
            return "\n".join(self._lines)

    def find(self, pattern: re.Pattern[str], start: int, limit_s: float) -> int:
        """Wait for a line; return the index after it.

        Raises:
            AssertionError: It did not come in time.
        """
        found: Optional[int] = None

        def there() -> bool:
            nonlocal found
            for index in range(start, len(self._lines)):
                if pattern.search(self._lines[index]):
                    found = index + 1
                    return True
            return self._ended

        with self._changed:
            self._changed.wait_for(there, limit_s)
        if found is None:
            message = f"no line like {pattern.pattern!r} in what was written:\n{self.text()}"
            raise AssertionError(message)
        return found


class Shell:
    """One bash for all shell blocks; what it starts ends with it."""

    END = "::end of the block::"

    def __init__(self) -> None:
        self.heard = Heard()
        self._process = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.heard.add(line)
        self.heard.end()

    def run(self, text: str, status: int) -> None:
        assert self._process.stdin is not None
        self.heard.clear()
        self._process.stdin.write(f"{text}\necho '{self.END}'$?\n")
        self._process.stdin.flush()
        ended = re.compile(re.escape(self.END))
        index = self.heard.find(ended, 0, OUTPUT_LIMIT_S)
        line = self.heard.text().split("\n")[index - 1]
        assert line.endswith(f"{self.END}{status}"), f"ended with {line}:\n{self.heard.text()}"

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        with self._process:
            self._reader.join(1.0)


class _Tee(io.TextIOBase):
    """Passes on what is written, and keeps its lines."""

    def __init__(self, stream: TextIO, heard: Heard) -> None:
        self._stream = stream
        self._heard = heard
        self._rest = ""

    def write(self, text: str) -> int:
        self._stream.write(text)
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._heard.add(line)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


def wait_for_half_a_second() -> None:
    """Return in the middle of a second.

    A program that is stopped some whole seconds later is not stopped at a scheduled time: a run
    that is granted just then is handed back, and documents show one that was executed.
    """
    left_ms = (1_500 - SystemClock().now_ms() % 1_000) % 1_000
    threading.Event().wait(left_ms / 1_000)


class Player:
    """Takes the steps one after the other."""

    def __init__(self, document: str) -> None:
        self._document = document
        self._shell: Optional[Shell] = None
        self._python_heard = Heard()
        self._heard = self._python_heard
        self._namespace: dict[str, Any] = {"__name__": "__example__"}
        sys.stdout = cast("TextIO", _Tee(sys.stdout, self._python_heard))
        sys.stderr = cast("TextIO", _Tee(sys.stderr, self._python_heard))

    def play(self, step: dict[str, Any]) -> None:
        kind, text, line = step["kind"], step["text"], step["line"]
        if kind == "file":
            Path(step["argument"]).write_text(text, encoding="utf-8")
        elif kind == "python":
            self._python(text, line, step["argument"])
        elif kind == "sh":
            self._shell = self._shell or Shell()
            self._heard = self._shell.heard
            if "timeout " in text:
                wait_for_half_a_second()
            self._shell.run(text, int(step["argument"] or 0))
        else:
            assert kind in ("output", "exact output")
            start = 0
            for shown in text.splitlines():
                if shown.strip() not in ("", "..."):
                    wanted = pattern_of(shown, exact=kind == "exact output")
                    start = self._heard.find(wanted, start, OUTPUT_LIMIT_S)

    def _python(self, text: str, line: int, raises: str) -> None:
        self._python_heard.clear()
        self._heard = self._python_heard
        # As many empty lines before it as in the document: tracebacks name the right place.
        code = compile("\n" * (line - 1) + text, self._document, "exec")
        try:
            exec(code, self._namespace)
        except BaseException as error:
            if not raises or type(error).__name__ != raises:
                raise
            self._python_heard.add(f"{type(error).__name__}: {error}")
        else:
            assert not raises, f"no {raises} was raised"

    def close(self) -> None:
        if self._shell is not None:
            self._shell.close()


def main() -> int:
    """Play the document whose steps stand in the file that is named."""
    document, steps = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.path.insert(0, str(Path.cwd()))
    player = Player(document)
    try:
        for step in steps:
            try:
                player.play(step)
            except BaseException:  # noqa: BLE001 - whatever an example ends with is told with its place
                traceback.print_exc()
                sys.stderr.write(f"{document}, line {step['line']}: {step['kind']} block failed\n")
                return 1
    finally:
        player.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
