"""A worker process for a scheduler."""

from __future__ import annotations

import argparse
import logging
import time
from typing import Final, Optional

from leasecron_sync.cli.target import HELP as TARGET_HELP
from leasecron_sync.cli.target import load_scheduler

NAME: Final = "run"
HELP: Final = "run a scheduler in this process until SIGTERM or SIGINT"

_LEVELS: Final = ("debug", "info", "warning", "error")

_logger = logging.getLogger("leasecron_sync.cli")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("target", metavar="MODULE:ATTRIBUTE", help=TARGET_HELP)
    parser.add_argument(
        "--log-level",
        metavar="LEVEL",
        choices=_LEVELS,
        default=None,
        help=f"what is logged to standard error: {', '.join(_LEVELS)} (default: info)",
    )


def command(options: argparse.Namespace) -> int:
    """Import the scheduler and run it; the first signal stops it, the second ends the process."""
    scheduler = load_scheduler(options.target)
    _log_to_stderr(options.log_level)
    if not scheduler.next_runs():
        _logger.warning("the scheduler has no jobs target=%r", options.target)
    scheduler.run_forever()
    return 0


def _log_to_stderr(level: Optional[str]) -> None:
    """Log readable lines, unless the application has set up logging itself."""
    if logging.getLogger().handlers:
        if level is not None:
            logging.getLogger("leasecron_sync").setLevel(level.upper())
        return
    formatter = logging.Formatter(
        "%(asctime)s.%(msecs)03dZ %(levelname)-7s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(level=(level or "info").upper(), handlers=[handler])
