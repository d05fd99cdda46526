"""Decodes with a model larger than a memory limit, and watches the process from outside.

The limit is a control group of the user's (`--cgroup`, a folder that may be written: the child enters it), or else the
system's limit on the data of a process (`ulimit -d`), which counts private memory whether it was touched or not. The
child is not told about the limit: it has to find it. Must not know how memory is budgeted.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from picaflor.runtime.machine import record_head
from picaflor.sizes import format_bytes, parse_bytes

PERIOD_S = 0.005


def charged(pid: int) -> int:
    """Anonymous, shared and locked bytes of a process now; 0 once it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    values = {line.split(":")[0]: line.split()[1] for line in text.splitlines() if line.endswith(" kB")}
    anonymous = int(values.get("RssAnon", 0)) + int(values.get("RssShmem", 0))
    return max(anonymous, int(values.get("VmLck", 0))) * 1024


def entering(limit: int, cgroup: Path | None) -> Callable[[], None]:
    """What the child does first."""

    def enter() -> None:
        if cgroup is not None:
            (cgroup / "cgroup.procs").write_text(str(os.getpid()))
        else:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    return enter


def watched(words: list[str], limit: int, cgroup: Path | None) -> dict[str, Any]:
    """Run a command of ours under the limit: its JSON, exit code, and the most memory that was seen."""
    command = [sys.executable, "-m", "picaflor", *words, "--json"]
    peak, samples = 0, 0
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=entering(limit, cgroup)
    ) as process:
        while process.poll() is None:
            peak = max(peak, charged(process.pid))
            samples += 1
            time.sleep(PERIOD_S)
        assert process.stdout is not None
        assert process.stderr is not None
        out, err = process.stdout.read(), process.stderr.read()
    return {
        "command": "picaflor " + " ".join([*words[:2], *words[3:], "--json"]),
        "exit": process.returncode,
        "peak_bytes": peak,
        "samples": samples,
        "stderr": err.strip().splitlines()[-3:],
        "result": json.loads(out) if process.returncode == 0 else None,
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Decode under a memory limit, watched from outside.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--limit", default="1GiB")
    parser.add_argument("--cgroup", type=Path, help="a group's folder with this limit set")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--note", default="")
    words = parser.parse_args()
    limit = parse_bytes(words.limit)
    size = sum(shard.stat().st_size for shard in words.model.glob("*.safetensors"))
    bench = ["bench", "decode", str(words.model), "--tokens", str(words.tokens), "--repeats", "2"]
    found = watched(bench, limit, words.cgroup)
    record = {
        **record_head("memory limit", note=words.note),
        "model": words.model.name,
        "model_bytes": size,
        "limit_bytes": limit,
        "limit_by": "cgroup" if words.cgroup else "ulimit -d",
        **found,
    }
    print(json.dumps(record, indent=1))
    print(
        f"{words.model.name}, {format_bytes(size)}, under {format_bytes(limit)} ({record['limit_by']}): exit "
        f"{found['exit']}, most memory {format_bytes(found['peak_bytes'])}",
        file=sys.stderr,
    )
    return int(found["exit"] != 0 or found["peak_bytes"] > limit)


if __name__ == "__main__":
    sys.exit(main())
