"""The worked examples of the format descriptions, byte by byte, both ways."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from picaflor.formats import REGISTRY, e8_iq3, fp8_b128, mxfp4


def raw(text: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytes.fromhex(text), dtype=np.uint8)


def f32(*values: float) -> np.ndarray[Any, Any]:
    return np.array(values, dtype=np.float32)


def encode(name: str, weights: Any, group_size: int = 0) -> tuple[Any, ...]:
    encoder = REGISTRY[name].encode
    assert encoder is not None
    return encoder(np.array(weights, dtype=np.float32), group_size)


def test_int8_row() -> None:
    codes, scales = encode("int8-row", [[0.5, -1, 0.25, 0.75], [0, 0, 0, 0]])
    assert codes.tobytes() == bytes.fromhex("40 81 20 5f 00 00 00 00")
    np.testing.assert_array_equal(scales, f32(0.007874016, 1e-8))
    decoded = REGISTRY["int8-row"].decode((codes, scales), 2, 4, 0)
    np.testing.assert_allclose(decoded.astype(np.float64) @ [1, 2, 3, 4], [2.25196838, 0], rtol=1e-7)


def test_int8_row_extremes() -> None:
    decoded = REGISTRY["int8-row"].decode((raw("80 7f ff 00"), f32(0.5)), 1, 4, 0)
    np.testing.assert_array_equal(decoded, [[-64, 63.5, -0.5, 0]])


@pytest.mark.parametrize("text", ["1f 9c 86 a9 b5 81", "1f 9c 06 a9 b5 01"])
def test_int4_row_ignores_padding(text: str) -> None:
    decoded = REGISTRY["int4-row"].decode((raw(text), f32(0.1, 1.14285719)), 2, 5, 0)
    np.testing.assert_allclose(
        decoded, [[0.7, -0.7, 0.4, 0.1, -0.2], [1.14285719, 2.28571439, -3.4285717, 3.4285717, -8]], rtol=3e-7
    )


def test_int4_row_writer() -> None:
    codes, scales = encode("int4-row", [[0.7, -0.7, 0.35, 0.1, -0.2], [1, 2, -3, 4, -8]])
    assert codes.tobytes() == bytes.fromhex("1f 9c 86 a9 b5 81")
    np.testing.assert_array_equal(scales, f32(0.1, 1.14285719))


def test_int4_row_extremes() -> None:
    decoded = REGISTRY["int4-row"].decode((raw("00 ff"), f32(0.5)), 1, 4, 0)
    np.testing.assert_array_equal(decoded, [[-4, -4, 3.5, 3.5]])


def test_int2_row() -> None:
    codes, scales = encode("int2-row", [[1, -1, 0.5, -0.4, 0], [0.9, -2, 2, 0, 0]])
    assert codes.tobytes() == bytes.fromhex("a7 02 b6 02")
    np.testing.assert_array_equal(scales, [1, 2])
    decoded = REGISTRY["int2-row"].decode((codes, scales), 2, 5, 0)
    np.testing.assert_array_equal(decoded, [[1, -1, 0, 0, 0], [0, -2, 2, 0, 0]])


def test_int2_row_dirty_tail() -> None:
    decoded = REGISTRY["int2-row"].decode((raw("00 fd"), f32(3)), 1, 5, 0)
    np.testing.assert_array_equal(decoded, [[-6, -6, -6, -6, -3]])


def test_int4_grouped() -> None:
    decoded = REGISTRY["int4-grouped"].decode((raw("10 32 54 76 98 ba dc fe 10 32"), f32(0.25, 2)), 1, 20, 16)
    np.testing.assert_array_equal(decoded, [[*(0.25 * (k - 8) for k in range(16)), -16, -14, -12, -10]])


def test_int4_grouped_extremes() -> None:
    """Nibbles 0 and 15 are -8 and +7, of either half of a byte."""
    decoded = REGISTRY["int4-grouped"].decode((raw("00 ff 0f f0" + "88" * 4), f32(0.5)), 1, 16, 16)
    np.testing.assert_array_equal(decoded, [[-4, -4, 3.5, 3.5, 3.5, -4, -4, 3.5, *[0] * 8]])


def test_int4_grouped_writer() -> None:
    codes, scales = encode("int4-grouped", [np.arange(-10, 10)], 16)
    assert codes.tobytes() == bytes.fromhex("21 32 44 65 77 98 a9 cb dd fe")
    np.testing.assert_array_equal(scales, [f32(1.4285715, 1.2857143)])


@pytest.mark.parametrize("tail", ["00" * 15 + "00" * 8, "00" * 15 + "fc" + "ff" * 7])
def test_int3_ignores_padding(tail: str) -> None:
    planes = (raw("e9a4" * 8 + "f0" * 8 + "09" + tail), f32(0.666666687, 0.666666687))
    decoded = REGISTRY["int3-g64"].decode(planes, 1, 66, 0)[0]
    eight = f32(-2, -1.3333334, -1.3333334, -0.6666667, 0, 0.6666667, 1.3333334, 1.3333334)
    np.testing.assert_allclose(decoded, np.concatenate([np.tile(eight, 8), eight[:2]]), rtol=1e-7)


def test_int3_writer() -> None:
    codes, scales = encode("int3-g64", [[(k % 8 - 4) * 0.5 for k in range(66)]])
    assert codes.tobytes() == bytes.fromhex("e9a4" * 8 + "f0" * 8 + "09" + "00" * 15 + "fc" + "ff" * 7)
    np.testing.assert_array_equal(scales, [f32(0.666666687, 0.666666687)])


def test_e8_block() -> None:
    block = bytearray(98)
    block[1], block[2], block[8] = 5, 255, 1
    block[64:72] = np.array([0x30000085, 0xF0000000], dtype="<u4").tobytes()
    block[96:] = np.array([1.0], dtype="<f2").tobytes()
    decoded = REGISTRY["e8-iq3-lattice"].decode((raw(block.hex()), f32(6)), 1, 256, 0)[0]
    np.testing.assert_array_equal(decoded[:8], [-3.5, 3.5, -3.5, 3.5, 54.25, 10.5, 3.5, 3.5])
    np.testing.assert_array_equal(decoded[8:16], [-3.5, 24.5, 45.5, 54.25, 3.5, 3.5, 3.5, -3.5])
    np.testing.assert_array_equal(decoded[16:32], np.full(16, 3.5))
    np.testing.assert_array_equal(decoded[32:64], [77.5] + [15.5] * 31)
    np.testing.assert_array_equal(decoded[64:], np.full(192, 0.5))  # code 0: db = 0.25, magnitude 2


def test_e8_subnormal_super_scale_is_exact() -> None:
    block = bytearray(98)
    block[96] = 1
    decoded = REGISTRY["e8-iq3-lattice"].decode((raw(block.hex()), f32(6)), 1, 256, 0)
    np.testing.assert_array_equal(decoded, np.full((1, 256), 2.0**-24 * 0.25 * 2))


def test_e8_rotation() -> None:
    one = np.zeros(8, dtype=np.float32)
    one[0] = 1
    np.testing.assert_array_equal(e8_iq3.rotate(one), np.full(8, np.float32(-0.353553385)))
    expected = f32(6.36396074, 3.53553391, -9.19238758, 4.94974756, -3.53553391, -3.53553391, 2.12132025, -3.53553391)
    np.testing.assert_array_equal(e8_iq3.rotate(np.arange(1, 9, dtype=np.float32)), expected)
    expected = f32(
        1, 3, 2, -4, 9.19238758, 6.36396074, -17.6776695, 7.7781744, -6.36396074, -6.36396074, -0.707106769, -6.36396074
    )
    np.testing.assert_array_equal(e8_iq3.rotate(np.arange(1, 13, dtype=np.float32)), expected)


@pytest.mark.parametrize(
    ("size", "first"), [(8, "23"), (16, "0269"), (32, "c3ff11d3"), (2048, "a038f927"), (4096, "0b178fd2")]
)
def test_e8_rotation_signs(size: int, first: str) -> None:
    signs = e8_iq3.rotation_signs(size)
    assert signs.shape == (size,)
    packed = np.packbits(signs < 0, bitorder="little").tobytes()
    assert packed[: len(first) // 2].hex() == first
    assert set(np.unique(signs)) == {-1.0, 1.0}


def test_e8_rotation_blocks() -> None:
    assert e8_iq3.rotation_blocks(6144) == ((0, 2048), (2048, 4096))
    assert e8_iq3.rotation_blocks(1536) == ((0, 512), (512, 1024))
    assert e8_iq3.rotation_blocks(12) == ((0, 4), (4, 8))
    assert e8_iq3.rotation_blocks(65536) == ((0, 32768), (32768, 32768))
    assert e8_iq3.rotation_blocks(7) == ((0, 1), (1, 2), (3, 4))


def test_mxfp4() -> None:
    codes = np.array([i | (15 - i) << 4 for i in range(16)], dtype=np.uint8)
    exponents = np.array([128], dtype=np.uint8)
    decoded = REGISTRY["mxfp4"].decode((codes, exponents), 1, 32, 0)[0]
    first = [0, -12, 1, -8, 2, -6, 3, -4, 4, -3, 6, -2, 8, -1, 12, -0.0]
    second = [-0.0, 12, -1, 8, -2, 6, -3, 4, -4, 3, -6, 2, -8, 1, -12, 0]
    np.testing.assert_array_equal(decoded, first + second)
    np.testing.assert_array_equal(np.signbit(decoded), np.signbit(first + second))


def test_mxfp4_exponents_are_exact() -> None:
    scales = mxfp4.exponent_scales()
    assert scales[0] == 2.0**-127
    assert scales[1] == 2.0**-126
    assert scales[127] == 1
    assert scales[254] == 2.0**127
    assert np.isnan(scales[255])
    assert not np.isnan(scales[:255]).any()
    decoded = REGISTRY["mxfp4"].decode((raw("22" * 48), raw("00 ff 7f")), 1, 96, 0)[0]
    np.testing.assert_array_equal(decoded[:32], np.full(32, 2.0**-127))
    assert np.isnan(decoded[32:64]).all()
    np.testing.assert_array_equal(decoded[64:], np.ones(32))


@pytest.mark.parametrize(
    ("byte", "value"),
    [
        (0x00, 0.0),
        (0x01, 0.001953125),
        (0x07, 0.013671875),
        (0x08, 0.015625),
        (0x38, 1.0),
        (0x39, 1.125),
        (0x40, 2.0),
        (0x7E, 448.0),
        (0x80, -0.0),
        (0xB8, -1.0),
        (0xFE, -448.0),
    ],
)
def test_e4m3_values(byte: int, value: float) -> None:
    found = fp8_b128.e4m3_values()[byte]
    assert found == value
    assert np.signbit(found) == np.signbit(value)


def test_e4m3_has_two_nans_and_no_infinity() -> None:
    values = fp8_b128.e4m3_values()
    assert np.flatnonzero(~np.isfinite(values)).tolist() == [0x7F, 0xFF]
    assert np.isnan(values[[0x7F, 0xFF]]).all()


def test_e4m3_encode_every_value_and_every_tie() -> None:
    values = fp8_b128.e4m3_values()
    finite = np.array([code for code in range(256) if code & 0x7F != 0x7F], dtype=np.uint8)
    np.testing.assert_array_equal(fp8_b128.encode_e4m3(values[finite]), finite)
    positive = values[:0x7F].astype(np.float64)
    middles = ((positive[:-1] + positive[1:]) / 2).astype(np.float32)
    even = np.array([code if code % 2 == 0 else code + 1 for code in range(0x7E)], dtype=np.uint8)
    np.testing.assert_array_equal(fp8_b128.encode_e4m3(middles), even)
    np.testing.assert_array_equal(fp8_b128.encode_e4m3(-middles), even | 0x80)
    np.testing.assert_array_equal(fp8_b128.encode_e4m3(np.nextafter(middles, np.float32(1e9))), np.arange(1, 0x7F))
    np.testing.assert_array_equal(fp8_b128.encode_e4m3(np.nextafter(middles, np.float32(0))), np.arange(0, 0x7E))
    odd_ones = fp8_b128.encode_e4m3(f32(1e9, -np.inf, np.nan, 464, 465))
    assert odd_ones.tolist() == [0x7E, 0xFE, 0x7F, 0x7E, 0x7E]


def test_fp8_blocks() -> None:
    planes = (np.full((130, 130), 0x38, dtype=np.uint8), f32(1, 2, 4, 8))
    decoded = REGISTRY["fp8-e4m3-b128"].decode(planes, 130, 130, 0)
    x = np.zeros(130)
    x[[0, 129]] = 1
    y = decoded.astype(np.float64) @ x
    np.testing.assert_array_equal(y[:128], 3)
    np.testing.assert_array_equal(y[128:], 12)


def test_fp8_nan_stays_in_its_place() -> None:
    codes = np.full((2, 4), 0x38, dtype=np.uint8)
    codes[1, 2] = 0xFF
    decoded = REGISTRY["fp8-e4m3-b128"].decode((codes, f32(2)), 2, 4, 0)
    assert np.argwhere(np.isnan(decoded)).tolist() == [[1, 2]]
    assert np.nansum(decoded) == 14


def test_bf16_rounds_to_nearest_even() -> None:
    bits = np.array(
        [[0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x3F80FFFF, 0x7F7FFFFF, 0x80000000, 0x00000001]], np.uint32
    )
    (stored,) = encode("bf16", bits.view(np.float32))
    assert stored.tolist() == [[0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x3F81, 0x7F80, 0x8000, 0x0000]]
    nan = np.array([[0x7F800001, 0xFFFFFFFF]], dtype=np.uint32).view(np.float32)
    (stored,) = encode("bf16", nan)
    assert np.isnan(REGISTRY["bf16"].decode((stored,), 1, 2, 0)).all()


def test_bf16_decode_is_the_upper_half() -> None:
    stored = np.array([[0x3F80, 0xC000, 0x8000, 0x0001, 0x7F80]], dtype=np.uint16)
    decoded = REGISTRY["bf16"].decode((stored,), 1, 5, 0)
    np.testing.assert_array_equal(decoded, [[1, -2, 0, 2.0**-133, np.inf]])


def test_f16_keeps_subnormals() -> None:
    stored = np.array([[0x0001, 0x03FF, 0x0400, 0x7BFF, 0x8001]], dtype=np.uint16)
    decoded = REGISTRY["f16"].decode((stored,), 1, 5, 0)
    np.testing.assert_array_equal(decoded, [[2.0**-24, 1023 * 2.0**-24, 2.0**-14, 65504, -(2.0**-24)]])
