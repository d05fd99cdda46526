"""Weight formats: the registry of everything this package can decode.

Knows the formats by name; must not know files, kernels or devices. Order is that of `FormatId` in
native/cpu/weight.h.
"""

from __future__ import annotations

from picaflor.errors import UnknownFormat
from picaflor.formats import (
    bf16,
    e8_iq3,
    f16,
    f32,
    fp8_b128,
    int2_row,
    int3_g64,
    int4_grouped,
    int4_row,
    int8_row,
    mxfp4,
)
from picaflor.formats.base import Format

REGISTRY: dict[str, Format] = {
    module.FORMAT.name: module.FORMAT
    for module in (
        f32,
        bf16,
        f16,
        int8_row,
        int4_row,
        int2_row,
        int4_grouped,
        int3_g64,
        e8_iq3,
        mxfp4,
        fp8_b128,
    )
}


def get(name: str) -> Format:
    """The format of that name. Raises UnknownFormat naming the accepted ones."""
    try:
        return REGISTRY[name]
    except KeyError:
        raise UnknownFormat(f"unknown weight format {name!r}; known: {', '.join(REGISTRY)}") from None
