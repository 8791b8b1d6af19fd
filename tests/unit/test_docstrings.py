"""Public names are explained, and what is long or takes seconds has a reason for it."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_origin

ROOT = Path(__file__).parents[2]
PACKAGE = "leasecron_sync"
ENTRANCES = [PACKAGE, f"{PACKAGE}.backends", f"{PACKAGE}.testing"]

# A docstring that gives the reason names the limit: "Longer than 400 lines because ...".
MODULE_LINES = 400
FUNCTION_LINES = 60

# Durations are whole milliseconds, except where Python's own habit is seconds: stop(timeout=30.0)
# as in join(), run.wait(seconds) as in sleep(). Inside the package the unit is in the name.
SECONDS = {"timeout", "seconds"}
SECONDS_INSIDE = SECONDS | {"timeout_s"}

FunctionNode = Union[ast.FunctionDef, ast.AsyncFunctionDef]


# -- docstrings ----------------------------------------------------------------------------------


class Name(NamedTuple):
    """A public name; ``fields`` are what its docstring must list under Attributes."""

    path: str
    value: object
    fields: tuple[str, ...] = ()


def public_names() -> Iterator[Name]:
    for entrance in ENTRANCES:
        module = importlib.import_module(entrance)
        yield Name(entrance, module)
        for name in module.__all__:
            value = getattr(module, name)
            if get_origin(value) is Literal:  # a set of words has no docstring of its own
                continue
            path = f"{entrance}.{name}"
            yield Name(path, value, fields_of(value))
            if inspect.isclass(value):
                yield from members(path, value)


def members(path: str, owner: type) -> Iterator[Name]:
    """Yield the public methods and properties that come from this package."""
    for name, value in inspect.getmembers(owner):
        function = value.fget if isinstance(value, property) else value
        home = getattr(inspect.unwrap(function), "__module__", "") if callable(function) else ""
        if not name.startswith("_") and (home or "").startswith(PACKAGE):
            yield Name(f"{path}.{name}", value)


def fields_of(value: object) -> tuple[str, ...]:
    if not inspect.isclass(value):
        return ()
    if dataclasses.is_dataclass(value):
        return tuple(field.name for field in dataclasses.fields(value) if field.name[0] != "_")
    return tuple(getattr(value, "_fields", ()))


def own_documentation(value: object) -> str:
    """Return a docstring that somebody wrote, of this object or of what it overrides."""
    if inspect.isclass(value):
        # An exception without one would show that of Exception, a dataclass its signature.
        text = value.__dict__.get("__doc__") or ""
        return "" if text.startswith(f"{value.__name__}(") else inspect.cleandoc(text)
    return inspect.getdoc(value) or ""


NAMES = list(public_names())


def test_public_names_have_docstrings() -> None:
    assert len(NAMES) > 50
    assert [name.path for name in NAMES if not own_documentation(name.value)] == []


def test_the_first_line_of_a_docstring_is_one_sentence() -> None:
    wrong = []
    for name in NAMES:
        first, *rest = own_documentation(name.value).splitlines()
        if not first.endswith((".", "?")) or (rest and rest[0]):
            wrong.append(name.path)
    assert wrong == []


def test_the_fields_of_public_records_are_explained() -> None:
    missing = []
    for name in NAMES:
        text = own_documentation(name.value).partition("Attributes:")[2]
        explained = set(re.findall(r"^ +(\w+): \S", text, re.MULTILINE))
        missing += [f"{name.path}.{field}" for field in name.fields if field not in explained]
    assert missing == []


# -- lengths -------------------------------------------------------------------------------------


@cache
def trees() -> dict[str, ast.Module]:
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / PACKAGE).rglob("*.py"))
    }


def functions() -> Iterator[tuple[str, FunctionNode]]:
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{path}:{node.lineno} {node.name}", node


def gives_a_reason(docstring: str, limit: int) -> bool:
    return f"{limit} lines" in " ".join(docstring.split())


def test_long_modules_give_a_reason_in_their_docstring() -> None:
    found = []
    for path, tree in trees().items():
        length = len((ROOT / path).read_text(encoding="utf-8").splitlines())
        reason = gives_a_reason(ast.get_docstring(tree) or "", MODULE_LINES)
        if length > MODULE_LINES and not reason:
            found.append(f"{path} has {length} lines")
        if length <= MODULE_LINES and reason:
            found.append(f"{path} has {length} lines and needs no reason any more")
    assert not found, "\n".join(found)


def test_long_functions_give_a_reason_in_their_docstring() -> None:
    found = []
    for place, node in functions():
        assert node.end_lineno is not None
        length = node.end_lineno - node.lineno + 1
        if length > FUNCTION_LINES and not gives_a_reason(
            ast.get_docstring(node) or "", FUNCTION_LINES
        ):
            found.append(f"{place} has {length} lines")
    assert not found, "\n".join(found)


# -- seconds -------------------------------------------------------------------------------------


def parameters_in_seconds(function: FunctionNode) -> set[str]:
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return {
        argument.arg
        for argument in every
        if argument.annotation is not None
        and "float" in re.findall(r"\w+", ast.unparse(argument.annotation))
    }


def test_durations_are_whole_milliseconds() -> None:
    found = []
    for place, node in functions():
        found += [f"{place}({name})" for name in parameters_in_seconds(node) - SECONDS_INSIDE]
    assert found == []


def test_public_durations_are_named_like_those_of_python() -> None:
    found = []
    for name in NAMES:
        function: Any = name.value
        # An exception has no signature that could be read, and no parameters of its own.
        own = inspect.isclass(function) and not issubclass(function, BaseException)
        if inspect.isroutine(function) or own:
            floats = {
                parameter.name
                for parameter in inspect.signature(function).parameters.values()
                if "float" in re.findall(r"\w+", str(parameter.annotation))
            }
            found += [f"{name.path}({parameter})" for parameter in floats - SECONDS]
    assert found == []
