"""What the system says of this process's reads from storage.

Must not know budgets or models; memory is the ledger's business (store/budget.py).
"""

from __future__ import annotations

from pathlib import Path

_PROC = Path("/proc/self")


def physical_read_bytes(proc: Path = _PROC) -> int | None:
    """Bytes that this process caused to be fetched from storage so far, None where the system does not tell."""
    try:
        lines = (proc / "io").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, rest = line.partition(":")
        if key == "read_bytes" and rest.strip().isdigit():
            return int(rest)
    return None
