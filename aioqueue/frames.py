"""Where running code stands: the line of user code rather than that of the library it is in. Knows no job and no loop."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from types import FrameType

LIBRARY = os.path.dirname(os.__file__) + os.sep
LOOKS = 5
OURS = os.path.dirname(__file__) + os.sep


def stack(thread: int) -> list[FrameType]:
    """Return the frames of a thread, innermost first; empty for one that has ended.

    The longest of a few looks: it runs on meanwhile, and a generator's frame that has been left leads no further out.
    """
    longest: list[FrameType] = []
    for _ in range(LOOKS):
        frames = []
        frame = sys._current_frames().get(thread)
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        longest = max(longest, frames, key=len)
    return longest


def where(frames: Sequence[FrameType]) -> str:
    """Return 'file:line in function' of the innermost frame that is no library's, or else of the innermost.

    Looks no further out than the event loop: what has started that blocks nothing.
    """
    if not frames:
        return "an unknown place"
    shown = frames[0]
    for frame in frames:
        if not _of_library(frame):
            shown = frame
            break
        if frame.f_code.co_filename == asyncio.events.__file__:
            break
    return f"{shown.f_code.co_filename}:{shown.f_lineno} in {shown.f_code.co_name}"


def _of_library(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return path.startswith((LIBRARY, OURS)) or "-packages" in path or path.startswith("<frozen")
