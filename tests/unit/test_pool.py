"""The thread pool: every thread once per run, barriers, exceptions, fork, nesting."""

from __future__ import annotations

import os
import threading

import pytest

import picaflor._native as _native


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_every_thread_runs_once(threads: int) -> None:
    pool = _native.Pool(threads)
    assert pool.threads == threads
    for _ in range(50):
        seen: list[int] = []
        pool.run(seen.append)
        assert sorted(seen) == list(range(threads))


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_nobody_passes_a_barrier_before_all_have_arrived(threads: int) -> None:
    pool = _native.Pool(threads)
    arrived = [0] * threads
    wrong: list[str] = []

    def body(thread: int) -> None:
        for step in range(1, 40):
            arrived[thread] = step
            pool.barrier()
            if min(arrived) < step:
                wrong.append(f"thread {thread} at step {step}: {arrived}")
            pool.barrier()

    pool.run(body)
    assert not wrong


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_exception_of_any_thread_comes_out_and_the_pool_lives_on(failing: int) -> None:
    pool = _native.Pool(3)

    def body(thread: int) -> None:
        pool.barrier()
        if thread == failing:
            raise KeyError(f"thread {thread}")
        pool.barrier()
        pool.barrier()

    for _ in range(20):
        with pytest.raises(KeyError, match=f"thread {failing}"):
            pool.run(body)
        seen: list[int] = []
        pool.run(seen.append)
        assert sorted(seen) == [0, 1, 2]


def test_a_run_inside_a_run_is_an_error_not_a_deadlock() -> None:
    pool = _native.Pool(2)
    with pytest.raises(RuntimeError, match=r"Pool::run inside Pool::run"):
        pool.run(lambda thread: pool.run(lambda inner: None))
    inner_pool, seen = _native.Pool(2), []

    def body(thread: int) -> None:
        if thread == 0:
            inner_pool.run(seen.append)

    pool.run(body)  # another pool may be used inside
    assert sorted(seen) == [0, 1]


def test_callers_of_several_threads_take_turns() -> None:
    pool = _native.Pool(2)
    counts = [0, 0]

    def body(thread: int) -> None:
        counts[thread] += 1

    callers = [threading.Thread(target=lambda: [pool.run(body) for _ in range(50)]) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert counts == [150, 150]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_working_threads() -> None:
    pool = _native.Pool(3)
    pool.run(lambda thread: None)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            seen: list[int] = []
            pool.run(seen.append)
            grandchild = os.fork()
            if grandchild == 0:
                pool.run(seen.append)
                os._exit(0 if len(seen) == 6 else 1)
            nested = os.waitpid(grandchild, 0)[1]
            code = 0 if sorted(seen) == [0, 1, 2] and nested == 0 else 1
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    seen = []
    pool.run(seen.append)
    assert sorted(seen) == [0, 1, 2]


def test_a_pool_needs_a_thread() -> None:
    with pytest.raises(ValueError, match="at least 1 thread, got 0"):
        _native.Pool(0)
