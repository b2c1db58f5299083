"""Where running code stands: the line of user code rather than that of the library it is in. Knows no job and no loop."""

from __future__ import annotations

import asyncio
import os
from types import FrameType

LIBRARY = os.path.dirname(os.__file__) + os.sep
OURS = os.path.dirname(__file__) + os.sep


def where(frame: FrameType | None) -> str:
    """Return 'file:line in function' of the innermost frame that is no library's, or else of the innermost.

    Looks no further out than the event loop: what has started that blocks nothing.
    """
    shown = innermost = frame
    while shown is not None and _of_library(shown):
        shown = None if shown.f_code.co_filename == asyncio.events.__file__ else shown.f_back
    if (shown := shown or innermost) is None:
        return "an unknown place"
    return f"{shown.f_code.co_filename}:{shown.f_lineno} in {shown.f_code.co_name}"


def _of_library(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return path.startswith((LIBRARY, OURS)) or "-packages" in path or path.startswith("<frozen")
