"""Files that a user names: as much memory is taken as the file has, not as much as it might have."""

from __future__ import annotations

from pathlib import Path

import pytest

from picaflor.container.plain_file import PIECE_BYTES, read_plain
from picaflor.errors import BadStateFile


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, 2 * PIECE_BYTES + 5])
def test_a_large_bound_takes_no_memory(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a"
    data = bytes(range(251)) * (size // 251 + 1)
    path.write_bytes(data[:size])
    assert read_plain(path, most_bytes=1 << 60, error=BadStateFile) == data[:size]
    assert read_plain(path, most_bytes=size, error=BadStateFile) == data[:size]


def test_one_byte_too_many_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(11))
    with pytest.raises(BadStateFile, match="a: 11 bytes; at most 10 are read"):
        read_plain(path, most_bytes=10, error=BadStateFile)
    endless = Path("/proc/self/limits")  # says that it has no bytes
    if not endless.exists():
        pytest.skip("this system has no /proc")
    with pytest.raises(BadStateFile, match="more than 10 bytes; at most 10 are read"):
        read_plain(endless, most_bytes=10, error=BadStateFile)
