"""The kernels compile ahead of time for NVIDIA and AMD devices that this machine need not have.

Nothing is run: what is compiled for AMD is compiled, not run. Kernels are interpreted in this process, so they are
compiled in one of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="GPU kernels need torch")
pytest.importorskip("triton", reason="GPU kernels need triton")


def run(script: str, *words: str) -> str:
    """What a script prints, in a process where kernels are compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(("script", "least"), [("compile_products.py", 32), ("compile_rest.py", 9)])
def test_no_kernel_takes_a_format_that_there_is_not(script: str, least: int) -> None:
    """None has a branch for what is left over: the number behind the last format's is a compile error of its own."""
    assert int(run(script, "cuda:90:32", "--unknown").split()[0]) >= least


@pytest.mark.slow
@pytest.mark.parametrize("script", ["compile_products.py", "compile_rest.py"])
@pytest.mark.parametrize("target", ["cuda:80:32", "cuda:90:32", "cuda:120:32", "hip:gfx942:64", "hip:gfx1201:32"])
def test_kernels_compile(target: str, script: str) -> None:
    """Every kernel of matmul, prepare and experts, and every other one, in the variants that are launched.

    Products of many rows are computed by the matrix instruction of the device and by no other device's.
    """
    words = run(script, target).split()
    assert int(words[0]) >= 20
    if script == "compile_products.py":
        assert int(words[-1]) >= 9  # a kernel of many rows per integer format, two of experts
