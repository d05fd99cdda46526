"""Threads and the process around them: affinity, fork after use, Ctrl-C while decoding."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import child_environment, default_interrupt

from picaflor.backends.cpu.backend import CpuBackend
from picaflor.backends.cpu.threads import default_threads

HAS_AFFINITY = hasattr(os, "sched_setaffinity")
COUNT = "from picaflor.backends.cpu.backend import open_backend; print(open_backend().threads)"


def child(code: str, *words: str, start: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [*start, sys.executable, "-W", "ignore::DeprecationWarning", "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, env=child_environment(), timeout=120)


@pytest.mark.skipif(not HAS_AFFINITY, reason="this system has no affinity masks")
def test_a_process_bound_to_one_processor_uses_one_thread() -> None:
    cpu = min(os.sched_getaffinity(0))
    done = child(f"import os; os.sched_setaffinity(0, {{{cpu}}}); {COUNT}")
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


@pytest.mark.skipif(not HAS_AFFINITY, reason="this system has no affinity masks")
def test_the_default_is_never_above_the_mask() -> None:
    granted = os.sched_getaffinity(0)
    assert 1 <= default_threads() <= len(granted)
    assert CpuBackend().threads == default_threads()


def test_a_quota_is_rounded_down_and_never_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/app\n")
    (tmp_path / "sys/fs/cgroup/app").mkdir(parents=True)
    quotas = {"150000 100000": 1, "199999 100000": 1, "200000 100000": 2, "250000 100000": 2, "1000 100000": 1}
    for text, threads in quotas.items():
        (tmp_path / "sys/fs/cgroup/app/cpu.max").write_text(f"{text}\n")
        assert default_threads(root=tmp_path, cpus=8) == threads, text


FORKED = """
import os, signal, sys
from picaflor.runtime.engine import Engine, EngineOptions
from picaflor.runtime.generate import SamplingOptions

def write(engine):
    options = SamplingOptions(max_tokens=12, temperature=0.0)
    return [piece.token for piece in engine.generate(engine.tokenizer.encode("The old house"), options)]

slots = int(sys.argv[1]) or None
with Engine.open(None, EngineOptions(threads=2, expert_slots=slots)) as engine:
    wanted = write(engine)
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            code = 1
            try:
                code = 0 if write(engine) == wanted else 2
            finally:
                os._exit(code)
        status = os.waitpid(pid, 0)[1]
        assert status == 0, f"the child ended with status {status}"
        assert write(engine) == wanted
print(len(wanted))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.parametrize("slots", [0, 1], ids=["all experts in memory", "experts read again and again"])
def test_a_child_of_fork_decodes_and_so_does_its_parent(slots: int) -> None:
    done = child(FORKED, str(slots))
    assert (done.returncode, done.stdout) == (0, "12\n"), done.stderr


@pytest.mark.parametrize("words", [(), ("--expert-slots", "1"), ("--threads", "3")], ids=" ".join)
def test_an_interrupt_while_decoding_ends_the_run(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "picaflor", "run", "Once upon a time", "-n", "3000", "--seed", "1", *words]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=child_environment(),
        bufsize=0,
        preexec_fn=default_interrupt,
    ) as run:
        assert run.stdout is not None
        try:
            assert run.stdout.read(8)
            run.send_signal(signal.SIGINT)
            _, errors = run.communicate(timeout=60)
            assert run.returncode == 130
            assert errors.decode().splitlines()[-1] == "picaflor: interrupted"
        finally:
            run.kill()
