"""The signature of a task's function, its annotations resolved: what codecs are made from, and what none can be made from.

Which of the parameters is the context, and not of the payload, says definition.py.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic.fields import FieldInfo

from .errors import TaskDefinitionError


def read_signature(fn: Callable[..., Any], *, task: str) -> tuple[list[inspect.Parameter], object]:
    """Return a task's parameters, annotations resolved, and its return annotation (`Any` where it has none).

    Raises TaskDefinitionError for annotations that cannot be resolved, `*args`, `**kwargs`, parameters
    without annotation and type variables.
    """
    try:
        hints = typing.get_type_hints(fn, include_extras=True)
        parameters = list(inspect.signature(fn).parameters.values())
    except Exception as error:
        raise TaskDefinitionError(
            f"task {task!r}: its annotations cannot be resolved ({type(error).__name__}: {error}); "
            "names in annotations must be known at module level, above the task"
        ) from error
    result = []
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
            raise TaskDefinitionError(
                f"task {task!r}: {stars}{parameter.name} has no fixed payload; name each parameter, or take one list or dict"
            )
        if parameter.name not in hints:
            raise TaskDefinitionError(
                f"task {task!r}: parameter {parameter.name!r} has no annotation; the payload is made from annotations"
            )
        annotation = hints[parameter.name]
        if isinstance(annotation, TypeVar):
            raise TaskDefinitionError(
                f"task {task!r}: parameter {parameter.name!r} is a type variable; a payload needs a definite type"
            )
        if isinstance(parameter.default, FieldInfo):
            raise TaskDefinitionError(
                f"task {task!r}: the default of {parameter.name!r} is pydantic's Field(); write Annotated[…, Field(…)]"
            )
        result.append(parameter.replace(annotation=annotation))
    return result, hints.get("return", Any)
