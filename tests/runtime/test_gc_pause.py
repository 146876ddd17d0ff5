"""No garbage is collected during a pause of any thread."""

from __future__ import annotations

import gc
import threading

import pytest

from subtensors.kernels.runtime.gc_pause import gc_paused


def test_collection_resumes_when_the_last_nested_pause_ends() -> None:
    first, second = gc_paused(), gc_paused()
    with first:
        second.__enter__()
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_collection_stays_paused_when_another_threads_pause_ends() -> None:
    def ask() -> None:
        with gc_paused():
            pass

    with gc_paused():
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collection_resumes_after_an_error() -> None:
    with pytest.raises(ValueError, match="an error"), gc_paused():
        raise ValueError("an error")
    assert gc.isenabled()


def test_a_disabled_collector_stays_disabled() -> None:
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
