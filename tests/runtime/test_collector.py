"""No garbage is collected while somebody asks for none to be."""

from __future__ import annotations

import gc
import threading

import pytest

from subtensors.kernels.runtime.gc_pause import gc_paused


def test_the_collector_comes_back_when_the_last_one_is_done() -> None:
    first, second = gc_paused(), gc_paused()
    with first:
        second.__enter__()
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_another_thread_that_is_done_does_not_bring_it_back() -> None:
    def ask() -> None:
        with gc_paused():
            pass

    with gc_paused():
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_comes_back_after_an_error() -> None:
    with pytest.raises(ValueError, match="an error"), gc_paused():
        raise ValueError("an error")
    assert gc.isenabled()


def test_one_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
