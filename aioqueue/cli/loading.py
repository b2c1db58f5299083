"""Finds the app that `-A module:app` names; whatever is wrong with the name is said in one line, with the near one."""

from __future__ import annotations

import difflib
import importlib
import os
import pkgutil
import sys
from collections.abc import Iterable
from types import ModuleType

from aioqueue.app import AioQueue
from aioqueue.lines import one_line

from .failure import Failure, Misuse


def load_app(spec: str) -> AioQueue:
    """Import `module:attribute` (`:app` when left out), with the current directory on the path. Raises Failure."""
    name, colon, path = spec.partition(":")
    if not name or (colon and not path):
        raise Misuse(f"-A {spec!r}: expected module:attribute, such as tasks:app")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    module = _import(name, path or "app")
    found: object = module
    for part in (path or "app").split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise Misuse(f"module {name!r} has no {path or 'app'!r}{_apps(module, path or 'app')}") from None
    if not isinstance(found, AioQueue):
        raise Misuse(f"{name}:{path or 'app'} is {_kind(found)}, not an AioQueue{_apps(module, path or 'app')}")
    return found


def _import(name: str, attribute: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing and (name == missing or name.startswith(f"{missing}.")):
            near = difflib.get_close_matches(name, _modules(name), n=1)
            hint = f"; did you mean {near[0]}:{attribute}?" if near else f"; looked in {os.getcwd()} and where Python looks"
            raise Misuse(f"there is no module {name!r}{hint}") from None
        raise _broken(name, error) from error
    except Exception as error:
        raise _broken(name, error) from error


def _broken(name: str, error: Exception) -> Failure:
    return Failure(f"module {name!r} cannot be imported: {type(error).__name__}: {one_line(str(error))} (-v shows where)")


def _modules(name: str) -> Iterable[str]:
    """Names beside the wanted one: in its package, or in the current directory."""
    package, dot, _ = name.rpartition(".")
    try:
        places = list(importlib.import_module(package).__path__) if package else [os.getcwd()]
    except (ImportError, AttributeError):
        places, package, dot = [os.getcwd()], "", ""
    return [f"{package}{dot}{found.name}" for found in pkgutil.iter_modules(places)]


def _apps(module: ModuleType, wanted: str) -> str:
    """Name the app that was meant: the near one of those in the module, or the only one."""
    apps = [name for name, value in vars(module).items() if isinstance(value, AioQueue)]
    near = difflib.get_close_matches(wanted, apps, n=1) or (apps if len(apps) == 1 else [])
    if near:
        return f"; did you mean {module.__name__}:{near[0]}?"
    return f"; it has {', '.join(apps)}" if apps else "; it has no AioQueue at all"


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"
