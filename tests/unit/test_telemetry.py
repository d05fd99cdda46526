"""Records: derived figures, shares, verdicts and the printed report, against values worked out by hand."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from picaflor.telemetry.names import METRICS
from picaflor.telemetry.process import physical_read_bytes
from picaflor.telemetry.record import Memory, Phase, Record, percentile
from picaflor.telemetry.report import as_json, print_report, rows
from picaflor.telemetry.verdict import verdict

DECODE = Phase(
    tokens=50,
    wall_s=5.0,
    step_s=tuple(0.05 + 0.001 * step for step in range(50)),
    seconds={"read_wait": 2.0, "experts": 1.0, "matmul": 0.5, "attention": 0.75, "router": 0.05, "head": 0.2},
    hits_pinned=1000,
    hits_lru=600,
    loads=2400,
    read_bytes=6_200_000_000,
    read_service_s=8.0,
    read_busy_s=3.1,
    weight_bytes=17_500_000_000,
    storage_bytes=6_138_000_000,
)
RECORD = Record(
    model="mid",
    description="glm_moe_dsa, 12 layers",
    parameters=3_000_000_000,
    isa="avx512",
    threads=2,
    context=4096,
    seed=7,
    temperature=0.7,
    top_p=0.9,
    finish_reason="length",
    load_s=1.5,
    first_token_s=0.25,
    prefill=Phase(tokens=12, wall_s=0.2, seconds={"experts": 0.1}),
    decode=DECODE,
    memory=Memory(
        budget_bytes=734003200,
        anonymous_bytes=700 * 1024**2,
        resident_experts=80,
        resident_expert_bytes=2**27,
        pinned_experts=16,
        all_experts=640,
        all_expert_bytes=2**30,
        budget_source="--ram given",
        expert_slots=8,
    ),
    moe_layers=10,
    experts_per_token=8,
    readers=4,
    physical_read_bytes=6_300_000_000,
    kernels={"cpu.matmul.int4-grouped.avx512": 1200},
)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([], 50, 0.0),
        ([3.0], 99, 3.0),
        ([4.0, 1.0, 3.0, 2.0], 50, 2.0),
        ([4.0, 1.0, 3.0, 2.0], 90, 4.0),
        ([float(n) for n in range(1, 101)], 99, 99.0),
        ([float(n) for n in range(1, 101)], 90, 90.0),
        ([5.0, 1.0], 0, 1.0),
    ],
)
def test_percentile(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == expected


def test_derived_figures() -> None:
    assert DECODE.tokens_per_s == 10.0
    assert DECODE.hit_rate == 0.4
    assert DECODE.read_bytes_per_token == 124e6
    assert DECODE.read_bytes_per_s == pytest.approx(2e9)
    figures = DECODE.to_json(moe_layers=10)
    assert figures["loads_per_token"] == 48.0
    assert figures["loads_per_layer"] == 4.8
    assert figures["step_p50_s"] == pytest.approx(0.074)
    assert figures["step_p90_s"] == pytest.approx(0.094)
    assert figures["step_max_s"] == pytest.approx(0.099)
    assert (figures["read_wait_s"], figures["read_service_s"]) == (2.0, 8.0)
    assert (figures["wanted_per_token"], figures["wanted_per_layer"]) == (80.0, 8.0)
    assert figures["read_bytes_per_s_per_reader"] == 775e6
    assert figures["reads_at_once"] == pytest.approx(8 / 3.1)
    assert figures["read_busy_share"] == pytest.approx(0.62)
    assert (figures["cold_read_bytes"], figures["warm_read_bytes"]) == (6_138_000_000, 62_000_000)


def test_cold_and_warm_add_up_to_what_was_read() -> None:
    more = replace(DECODE, storage_bytes=9_000_000_000)  # other files were read too
    assert more.cold_read_bytes == 6_200_000_000
    assert more.to_json(moe_layers=1)["warm_read_bytes"] == 0
    untold = replace(DECODE, storage_bytes=None).to_json(moe_layers=1)
    assert (untold["cold_read_bytes"], untold["warm_read_bytes"]) == (None, None)
    assert (
        "from storage" not in dict(rows(replace(RECORD, decode=replace(DECODE, storage_bytes=None))))["reads, decode"]
    )


def test_shares_add_to_one() -> None:
    shares = DECODE.shares()
    assert shares["read_wait"] == 0.4
    assert shares["experts"] == 0.2
    assert shares["other"] == pytest.approx(0.1)
    assert sum(shares.values()) == pytest.approx(1.0, abs=1e-12)


def test_shares_when_the_clocks_disagree() -> None:
    shares = Phase(tokens=1, wall_s=1.0, seconds={"experts": 1.5, "head": 0.5}).shares()
    assert (shares["experts"], shares["head"], shares["other"]) == (0.75, 0.25, 0.0)
    assert set(Phase().shares().values()) == {0.0}


def test_unknown_time_class_is_refused() -> None:
    with pytest.raises(ValueError, match="time class sleep is not one of read_wait, experts"):
        Phase(seconds={"sleep": 1.0})


def test_empty_record_divides_nothing() -> None:
    figures = as_json(Record(model="none"))
    assert figures["verdict"] == "nothing measured"
    assert figures["decode"]["tokens_per_s"] is None
    assert figures["decode"]["hit_rate"] is None
    assert set(figures["decode"]["shares"].values()) == {None}
    assert (figures["load_s"], figures["first_token_s"]) == (None, None)


def test_what_was_not_measured_is_null_and_what_was_zero_is_zero() -> None:
    figures = RECORD.to_json()
    prefill, decode = figures["prefill"], figures["decode"]
    for name in ("steps", "step_p50_s", "step_p90_s", "step_p99_s", "step_max_s", "weight_bytes", "hit_rate"):
        assert prefill[name] is None, name
        assert decode[name] is not None, name
    assert (prefill["loads"], prefill["read_bytes"], prefill["read_busy_s"]) == (0, 0, 0.0)
    assert prefill["read_bytes_per_s"] is None
    assert (decode["steps"], decode["joined"]) == (50, 0)
    unmeasured = replace(DECODE, read_busy_s=0.0).to_json(moe_layers=0)
    assert (unmeasured["read_busy_s"], unmeasured["read_bytes_per_s"]) == (None, None)
    assert unmeasured["loads_per_layer"] is None
    assert replace(DECODE, hits_pinned=0, hits_lru=0).to_json(moe_layers=1)["hit_rate"] == 0.0


def test_verdict_of_a_device_names_the_rates_of_all_three_places() -> None:
    """300 MB per token at 3 TB/s, 40 MB at 20 GB/s, 10 MB at 2 GB/s: the disk gives the ceiling, then the link."""
    decode = Phase(
        tokens=10,
        wall_s=0.1,
        hits_device=60,
        loads=20,
        sent=20,
        sent_bytes=400_000_000,
        read_bytes=100_000_000,
        read_busy_s=0.05,
        weight_bytes=3_000_000_000,
    )
    record = replace(
        RECORD,
        backend="cuda",
        decode=decode,
        memory_limit_bytes_per_s=3e12,
        link_bytes_per_s=2e10,
        memory=replace(RECORD.memory, device_experts=7),
    )
    judged = verdict(record)
    assert judged.kind == "disk-bound"
    assert judged.text == (
        "disk-bound: per token of decode device memory 3000.00 GB/s for 300.0 MB, RAM to device 20.00 GB/s for 40.0 MB,"
        " disk 2.00 GB/s for 10.0 MB -> ceiling 200.0 tok/s by disk, got 100.0"
    )
    table = dict(rows(record))
    assert "in the device's memory 75.0" in table["experts, decode"]
    assert table["sent, decode"] == "20 experts to the device, 400.0 MB"
    assert "7 experts in the device's memory" in table["memory"]
    warm = verdict(replace(record, decode=replace(decode, read_bytes=0)))
    assert warm.kind == "link-bound"
    assert "-> ceiling 500.0 tok/s by RAM to device" in warm.text
    fast = verdict(replace(record, decode=replace(decode, read_bytes=0), link_bytes_per_s=4e12))
    assert fast.kind == "memory-bound"
    assert verdict(replace(record, link_bytes_per_s=None)).kind == "balanced"


def test_verdict_of_a_device_and_a_cpu_that_share_experts() -> None:
    """Of 300 MB per token the CPU reads 100 from RAM at 50 GB/s, 10 of them from the disk; 4 MB are sent to stay."""
    decode = Phase(
        tokens=10,
        wall_s=0.1,
        hits_device=60,
        loads=20,
        on_host=20,
        on_host_bytes=1_000_000_000,
        sent=2,
        sent_bytes=40_000_000,
        read_bytes=100_000_000,
        read_busy_s=0.05,
        weight_bytes=3_000_000_000,
    )
    record = replace(
        RECORD,
        backend="cuda",
        decode=decode,
        memory_limit_bytes_per_s=3e12,
        link_bytes_per_s=2e10,
        host_memory_bytes_per_s=5e10,
    )
    judged = verdict(record)
    assert judged.text == (
        "disk-bound: per token of decode device memory 3000.00 GB/s for 200.0 MB, RAM 50.00 GB/s for 100.0 MB,"
        " RAM to device 20.00 GB/s for 4.0 MB, disk 2.00 GB/s for 10.0 MB -> ceiling 200.0 tok/s by disk, got 100.0"
    )
    table = dict(rows(record))
    assert table["shared, decode"] == "60 experts found on the device, 20 computed by the CPU from 1.00 GB"
    assert table["sent, decode"] == "2 experts to the device, 40.0 MB"
    assert "experts outside the device's memory are computed by the CPU" in table["setup"]
    warm = replace(decode, read_bytes=0, sent=0, sent_bytes=0)
    assert verdict(replace(record, decode=warm, link_bytes_per_s=None)).text == (
        "memory-bound: per token of decode device memory 3000.00 GB/s for 200.0 MB, RAM 50.00 GB/s for 100.0 MB"
        " -> ceiling 500.0 tok/s by RAM, got 100.0"
    )
    assert verdict(replace(record, host_memory_bytes_per_s=None)).kind == "balanced"


def test_disk_verdict_has_the_ceiling() -> None:
    judged = verdict(RECORD)
    assert judged.kind == "disk-bound"
    assert judged.text == (
        "disk-bound: 40% of decode waits for reads; disk 2.00 GB/s, 124.0 MB per token -> ceiling 16.1 tok/s, got 10.0;"
        " hit rate 40.0%: 0.9 GB more RAM would hold all experts and give about 16.7"
    )


def test_disk_verdict_names_the_memory_that_pays() -> None:
    """Of 30 GB on disk 8 would take 8/30 of the waiting away: 5 s become 3.93 for 50 tokens."""
    decode = replace(DECODE, seconds={"read_wait": 4.0})
    memory = Memory(
        resident_experts=100, resident_expert_bytes=10 * 10**9, all_experts=400, all_expert_bytes=40 * 10**9
    )
    judged = verdict(replace(RECORD, decode=decode, memory=memory))
    assert judged.text.endswith("; hit rate 40.0%: 8 GB more RAM would give about 12.7")
    waits_less = replace(DECODE, seconds={"read_wait": 1.6})
    judged = verdict(replace(RECORD, decode=waits_less, memory=memory))
    assert judged.text.endswith("30.0 GB more RAM would hold all experts and give about 14.7")
    judged = verdict(replace(RECORD, memory=Memory()))
    assert judged.text.endswith("hit rate 40.0%: more memory (--ram) would help most")


def test_disk_verdict_says_when_the_page_cache_gave_the_bytes() -> None:
    cached = verdict(replace(RECORD, decode=replace(DECODE, storage_bytes=620_000_000)))
    assert "; 90% of the bytes were in the system's page cache, not on the disk; hit rate 40.0%" in cached.text
    assert "page cache" not in verdict(RECORD).text


def test_disk_verdict_at_a_high_hit_rate_asks_for_a_faster_disk() -> None:
    decode = replace(DECODE, hits_lru=30_000)
    assert verdict(replace(RECORD, decode=decode)).text.endswith("hit rate 92.8%: a faster disk would help most")


def test_disk_verdict_without_busy_time_gives_a_bound() -> None:
    judged = verdict(replace(RECORD, decode=replace(DECODE, read_busy_s=0.0)))
    assert "; disk at most 3.10 GB/s, 124.0 MB per token -> ceiling 25.0 tok/s, got 10.0;" in judged.text
    judged = verdict(replace(RECORD, decode=replace(DECODE, read_busy_s=0.0), readers=0))
    assert "ceiling" not in judged.text


def test_joined_reads_are_wanted_but_no_hits() -> None:
    phase = replace(DECODE, joined=1000)
    assert (phase.wanted, phase.hit_rate) == (5000, 0.32)
    assert ", loaded 2400, joined 1000 (" in dict(rows(replace(RECORD, decode=phase)))["experts, decode"]


@pytest.mark.parametrize(
    ("seconds", "kind"),
    [
        ({"read_wait": 1.5, "experts": 3.5}, "disk-bound"),
        ({"read_wait": 1.49, "experts": 3.0}, "compute-bound"),
        ({"experts": 1.0, "matmul": 0.6, "head": 0.4, "attention": 2.9}, "compute-bound"),
        ({"experts": 1.99, "attention": 1.75}, "attention-bound"),
        ({"experts": 1.9, "attention": 1.7, "read_wait": 1.4}, "balanced"),
    ],
)
def test_verdict_thresholds(seconds: dict[str, float], kind: str) -> None:
    assert verdict(replace(RECORD, decode=replace(DECODE, seconds=seconds))).kind == kind


@pytest.mark.parametrize(("limit", "kind"), [(29e9, "memory-bound"), (30e9, "compute-bound")])
def test_memory_or_compute(limit: float, kind: str) -> None:
    decode = replace(DECODE, seconds={"experts": 1.0}, wall_s=1.25, tokens=10, weight_bytes=17_500_000_000)
    judged = verdict(replace(RECORD, decode=decode, memory_limit_bytes_per_s=limit))
    assert judged.kind == kind
    assert f"at 17.5 of memory's {limit / 1e9:.1f} GB/s" in judged.text
    assert f"1750.0 MB per token -> ceiling {limit / 1.75e9:.1f} tok/s, got 8.0" in judged.text


def test_prefill_is_judged_where_nothing_was_decoded() -> None:
    judged = verdict(replace(RECORD, decode=Phase()))
    assert judged.text.startswith("compute-bound: 50% of prefill multiplies weights")


def leaves(value: Any, name: str = "") -> set[str]:
    if isinstance(value, dict) and name not in ("shares", "kernels", "fallbacks"):
        return set().union(*(leaves(inner, key) for key, inner in value.items()))
    return {name}


def test_every_figure_has_a_name_and_a_unit() -> None:
    figures = as_json(RECORD)
    assert json.loads(json.dumps(figures)) == figures
    assert leaves(figures) == set(METRICS)


def test_report_lines() -> None:
    table = dict(rows(RECORD))
    assert table["setup"] == (
        "cpu, avx512, standard, 2 threads, context 4096, temperature 0.7, top-p 0.9, seed 7, loaded in 1.50 s"
    )
    granted = dict(rows(replace(RECORD, threads_source="affinity allows 2 processors")))["setup"]
    assert "2 threads (affinity allows 2 processors), context" in granted
    assert "standard, 1 thread, context" in dict(rows(replace(RECORD, threads=1)))["setup"]
    assert table["prefill"] == "12 tokens in 0.200 s, 60.0 tok/s, first token after 0.250 s (1.750 s with loading)"
    assert dict(rows(replace(RECORD, load_s=0.0)))["prefill"].endswith("first token after 0.250 s")
    assert table["decode"] == "50 tokens in 5.000 s, 10.0 tok/s, ended by length"
    assert table["latency"] == "p50 74.00 ms, p90 94.00, p99 99.00, max 99.00"
    assert table["experts, decode"] == (
        "hit rate 40.0% = pinned 25.0 + LRU 15.0, loaded 2400 (48.00 loads per token, 4.80 of 8.00 wanted per layer)"
    )
    ahead = dict(rows(replace(RECORD, decode=replace(DECODE, hits_lru=200, hits_prefetched=400))))
    assert ahead["experts, decode"].startswith(
        "hit rate 40.0% = pinned 25.0 + LRU 5.0 + read ahead 10.0, loaded 2400 ("
    )
    assert table["reads, decode"] == (
        "6.20 GB, 124.00 MB per token, 99% of it from storage, 2.00 GB/s, 2.6 reads at once, busy 62% of the time;"
        " service 8.000 s over all readers, waited 2.000 s"
    )
    assert table["memory"] == (
        "anonymous 700 MiB, budget 700 MiB (--ram given); 80 experts in memory, 128 MiB, 16 of them pinned,"
        " 560 on disk, 896 MiB, 8 slots per layer"
    )
    assert table["time"] == (
        "read wait 40.0%, experts 20.0%, attention 15.0%, matmul 10.0%, other 10.0%, head 4.0%, router 1.0%"
    )
    assert table["kernels"] == "cpu.matmul.int4-grouped.avx512 1200"
    assert table["fallbacks"] == "none"


def test_long_tail_is_named() -> None:
    steps = (0.01,) * 32 + (0.05,)
    text = dict(rows(replace(RECORD, decode=replace(DECODE, step_s=steps))))["latency"]
    assert text.endswith("(long tail: p99 is 5.0 times p50)")
    text = dict(rows(replace(RECORD, decode=replace(DECODE, step_s=steps[2:]))))["latency"]
    assert "long tail" not in text


def test_printed_report_has_every_row_and_no_markup() -> None:
    stream = io.StringIO()
    long = "w" * 300
    print_report(replace(RECORD, warnings=("[odd] name", "second", long), fallbacks={"a->b.-": 3}), stream)
    text = stream.getvalue()
    assert long in text
    for part in ("warning", "[odd] name", "second", "a->b 3", "disk-bound"):
        assert part in text
    assert "\x1b" not in text
    lines = text.splitlines()
    assert [line for line in lines if line != line.rstrip()] == []
    assert len(lines) == len(rows(RECORD)) + 3
    assert len({line.index(word) for line in lines for word in ("second", "mid, glm") if word in line}) == 1


def test_physical_read_bytes(tmp_path: Path) -> None:
    assert physical_read_bytes(tmp_path) is None
    (tmp_path / "io").write_text("rchar: 9\nread_bytes: 4096\ncancelled_write_bytes: 0\n")
    assert physical_read_bytes(tmp_path) == 4096
