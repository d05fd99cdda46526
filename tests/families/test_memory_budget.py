"""The memory budget as the system sees it: anonymous and locked memory of a process, sampled from outside.

Must not trust any figure of the process itself.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
MIB = 1 << 20
TOLERANCE = 1.02

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system has no /proc")


def generator() -> Any:
    """The module that writes synthetic models."""
    spec = importlib.util.spec_from_file_location("generate_glm", ROOT / "benchmarks" / "generate_glm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def charged(pid: int) -> int:
    """Anonymous, shared and locked bytes of a process now; 0 once it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    values = {line.split(":")[0]: line.split()[1] for line in text.splitlines() if line.endswith(" kB")}
    anonymous = int(values.get("RssAnon", 0)) + int(values.get("RssShmem", 0))
    return max(anonymous, int(values.get("VmLck", 0))) * 1024


def peak_of(words: list[str]) -> tuple[int, str]:
    """(most memory of a command of ours, its output)."""
    command = [sys.executable, "-m", "picaflor", *words]
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        while process.poll() is None:
            peak = max(peak, charged(process.pid))
            time.sleep(0.003)
        assert process.stdout is not None
        output = process.stdout.read()
    assert process.returncode == 0, output
    return peak, output


def test_a_small_model_stays_in_the_smallest_budget_that_is_accepted(tmp_path: Path) -> None:
    generator().generate("glm-nano", tmp_path / "nano", seed=5)
    words = ["bench", "decode", str(tmp_path / "nano"), "--tokens", "40", "--prompt-tokens", "300", "--repeats", "2"]
    command = [sys.executable, "-m", "picaflor", *words, "--ram", "20MiB"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert len(refused.stderr.strip().splitlines()) == 1
    budget = int(refused.stderr.split("give --ram ")[1].split("MiB")[0])
    peak, _ = peak_of([*words, "--ram", f"{budget}MiB"])
    assert peak <= budget * MIB * TOLERANCE
    assert peak > budget * MIB / 3, "the ledger asks for far more than is used"


@pytest.mark.slow
@pytest.mark.parametrize("ram", [700, 450])
def test_glm_mid_streams_under_a_budget(tmp_path: Path, ram: int) -> None:
    generator().generate("glm-mid", tmp_path / "mid", seed=1)
    words = ["bench", "decode", str(tmp_path / "mid"), "--tokens", "24", "--prompt-tokens", "600", "--repeats", "1"]
    peak, output = peak_of([*words, "--ram", f"{ram}MiB"])
    assert peak <= ram * MIB * TOLERANCE
    assert "0 B from disk" not in output
