"""The line that is named is user code's, if there is any within reach."""

import json
import threading

from aioqueue.frames import stack, where


def test_user_code_is_named_and_not_the_library_that_it_is_in() -> None:
    found: list[str] = []

    def pairs(_: object) -> None:
        found.append(where(stack(threading.get_ident())[2:]))  # from the standard library on

    json.JSONDecoder(object_pairs_hook=pairs, object_hook=None).decode('{"a": 1}')
    assert "test_frames.py:" in found[0]
    assert found[0].endswith("in test_user_code_is_named_and_not_the_library_that_it_is_in")


def test_where_nothing_is_user_codes_it_is_the_innermost_line() -> None:
    event = threading.Event()
    thread = threading.Thread(target=event.wait)
    thread.start()
    frames = stack(thread.ident or 0)
    event.set()
    thread.join()
    assert "threading.py:" in where(frames)
    assert stack(thread.ident or 0) == [] and where([]) == "an unknown place"
