"""From MODULE:ATTRIBUTE to the scheduler of an application."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any, Final, Optional, cast

import leasecron_sync
from leasecron_sync.backends.base import Backend
from leasecron_sync.cli.output import CommandError, UsageError
from leasecron_sync.scheduler import Scheduler

HELP: Final = "where the scheduler is: a module and a name in it, such as jobs:scheduler"

_OWN = f"{Path(leasecron_sync.__file__).parent}{os.sep}"


def load_scheduler(target: str) -> Scheduler[Backend]:
    """Import a module and return the scheduler that it holds.

    The working directory goes first where modules are looked for.

    Args:
        target: Module, colon, and name, which may have dots.

    Raises:
        UsageError: It is not of this form.
        CommandError: There is no such module or name, the module raised, or it is no scheduler.
    """
    module_name, separator, attribute = target.partition(":")
    names = [*module_name.split("."), *attribute.split(".")]
    if not separator or not all(name.isidentifier() for name in names):
        message = f"{target!r} is not MODULE:ATTRIBUTE, such as jobs:scheduler{_hint(module_name)}"
        raise UsageError(message)
    found: Any = _imported(module_name)
    for name in attribute.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            there = _schedulers_of(sys.modules[module_name])
            hint = f"; there is: {', '.join(there)}" if there else ""
            message = f"module {module_name!r} has no {attribute!r}{hint}"
            raise CommandError(message) from None
    if not isinstance(found, Scheduler):
        message = f"{target} is no Scheduler, but {_described(found)}"
        raise CommandError(message)
    return cast("Scheduler[Backend]", found)


def _hint(module_name: str) -> str:
    """Tell what to write instead of the path of a file."""
    if "/" not in module_name and not module_name.endswith(".py"):
        return ""
    name = module_name.removesuffix(".py").removeprefix("./").replace("/", ".").strip(".")
    return f"; the module in a file a/b.py is a.b, here {name}" if name else ""


def _schedulers_of(module: object) -> list[str]:
    names = vars(module).items()
    return sorted(f"{name!r}" for name, value in names if isinstance(value, Scheduler))


def _described(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__qualname__!r}"
    if callable(value):
        return "a function, which is not called here: name the scheduler itself"
    return f"an object of the type {type(value).__qualname__!r}"


def _imported(name: str) -> object:
    folder = os.getcwd()  # noqa: PTH109 - as text, for sys.path
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            message = f"there is no module {error.name!r}, neither in {folder!r} nor installed"
            message += _hint(name)
            raise CommandError(message) from None
        raise _told(name, error) from error
    except SystemExit as error:
        message = f"module {name!r} ended the process while it was imported: {error!r}"
        raise CommandError(message) from error
    except Exception as error:
        raise _told(name, error) from error


def _told(module_name: str, error: Exception) -> CommandError:
    """Tell in one line what a module raised, and where."""
    text = str(error)
    place = _place(error)
    if isinstance(error, SyntaxError):
        place, text = f"{error.filename}, line {error.lineno}", error.msg
    where = f" ({place})" if place else ""
    return CommandError(
        f"module {module_name!r} cannot be imported{where}: "
        f"{type(error).__name__}{': ' if text else ''}{text}"
    )


def _place(error: Exception) -> Optional[str]:
    """Return the innermost line of the user's own code, or else of any code but ours."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<frozen ", _OWN))
        and frame.filename != importlib.__file__
    ]
    folders = tuple(
        path
        for path in (sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib"))
        if path
    )
    own = [frame for frame in frames if not frame.filename.startswith(folders)]
    for frame in reversed(own or frames):
        return f"{frame.filename}, line {frame.lineno}"
    return None
