"""Sizes in words: values, units and refusals."""

from __future__ import annotations

import pytest

from picaflor.errors import UsageError
from picaflor.sizes import format_bytes, format_rate, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("12b", 12),
        ("1k", 1024),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("700MiB", 734003200),
        ("16G", 17179869184),
        ("16GiB", 17179869184),
        ("16 GB", 16000000000),
        (" 1.5gib ", 1610612736),
        ("0.1KB", 100),
        ("2tb", 2000000000000),
        ("2TiB", 2199023255552),
        ("0.3", 0),
    ],
)
def test_parse(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "12 parsecs", "1.GiB", "0x10", "1 GiB x", "nan", "1,5GB"])
def test_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size; give a number with KiB"):
        parse_bytes(text)


def test_too_large() -> None:
    assert parse_bytes("9223372036854775807") == 2**63 - 1
    with pytest.raises(UsageError, match="too large"):
        parse_bytes("9223372036854775808")
    with pytest.raises(UsageError, match="too large"):
        parse_bytes("99999999TiB")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (734003200, "700 MiB"),
        (1850 * 10**6, "1.72 GiB"),
        (1024**2 - 1, "1 MiB"),
        (24 * 1024**3, "24 GiB"),
        (25 * 1024**3 + 1024**3 // 2, "25.5 GiB"),
        (2**63, "8 EiB"),
    ],
)
def test_format(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(0.01234, "0.0123"), (24.06, "24.1"), (628.4, "628"), (999.4, "999"), (999.6, "1000"), (1943.7, "1944")],
)
def test_format_rate(rate: float, text: str) -> None:
    assert format_rate(rate) == text
