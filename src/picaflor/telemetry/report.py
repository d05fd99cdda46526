"""A record as words for a person.

Must not count or measure; it prints what the record holds, to the stream that it is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO

from picaflor.sizes import format_bytes
from picaflor.telemetry.record import Phase, Record, percentile
from picaflor.telemetry.verdict import verdict

TAIL_SAMPLES = 32
TAIL_FACTOR = 3


def rows(record: Record) -> list[tuple[str, str]]:
    """(label, text) per line of the report, top to bottom."""
    table = [("model", f"{record.model}{', ' + record.description if record.description else ''}")]
    table.append(("setup", _setup(record)))
    table.append(("prefill", f"{_speed(record.prefill)}, first token after {_first(record)}"))
    table.append(
        ("decode", _speed(record.decode) + (f", ended by {record.finish_reason}" * bool(record.finish_reason)))
    )
    if record.decode.step_s:
        table.append(("latency", _latency(record.decode.step_s)))
    for name, phase in (("prefill", record.prefill), ("decode", record.decode)):
        if phase.wanted:
            table.append((f"experts, {name}", _experts(phase, record)))
        if phase.read_bytes:
            table.append((f"reads, {name}", _reads(phase)))
        if phase.on_host:
            table.append((f"shared, {name}", _shared(phase)))
        if phase.sent:
            table.append((f"sent, {name}", f"{phase.sent} experts to the device, {_decimal(phase.sent_bytes)}"))
    if record.prefetch:
        table.append(("read ahead", _ahead(record)))
    if record.physical_read_bytes is not None:
        table.append(("storage", f"{_decimal(record.physical_read_bytes)} physically read"))
    table.append(("memory", _memory(record)))
    table.extend(("device", text) for text in record.devices)
    phase = record.decode if record.decode.tokens else record.prefill
    if phase.wall_s:
        table.append(("time", _shares(phase)))
    table.append(("kernels", _counts(record.kernels) or "none counted"))
    table.append(("fallbacks", _counts(record.fallbacks) or "none"))
    table.extend(("lossy", text) for text in record.lossy)
    table.extend(("warning", text) for text in record.warnings)
    table.append(("verdict", verdict(record).text))
    return table


def as_json(record: Record) -> dict[str, Any]:
    """The record and its verdict, ready for json.dumps."""
    judged = verdict(record)
    return {**record.to_json(), "verdict": judged.kind, "verdict_text": judged.text}


def print_report(record: Record, stream: TextIO) -> None:
    """Print all rows to `stream`, aligned; folded and with colour on a terminal, one plain line each elsewhere."""
    lines = rows(record)
    if not stream.isatty():
        width = max(len(label) for label, _ in lines)
        stream.writelines(f"{label:<{width}}  {' '.join(text.splitlines())}".rstrip() + "\n" for label, text in lines)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in lines:
        table.add_row(label, Text(text))
    Console(file=stream, highlight=False).print(table)


def _decimal(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _first(record: Record) -> str:
    text = f"{record.first_token_s:.3f} s"
    return text + f" ({record.load_s + record.first_token_s:.3f} s with loading)" * bool(record.load_s)


def _setup(record: Record) -> str:
    threads = f"{record.threads} thread{'s' * (record.threads != 1)}"
    threads += f" ({record.threads_source})" * bool(record.threads_source)
    parts = [record.backend, record.isa, record.precision, threads]
    if record.prefill.on_host or record.decode.on_host:
        parts.append("experts outside the device's memory are computed by the CPU")
    if record.context:
        parts.append(f"context {record.context}")
    if record.temperature is not None:
        parts.append(f"temperature {record.temperature:g}, top-p {record.top_p or 0:g}, seed {record.seed}")
    parts.append(f"loaded in {record.load_s:.2f} s")
    return ", ".join(part for part in parts if part)


def _speed(phase: Phase) -> str:
    return f"{phase.tokens} tokens in {phase.wall_s:.3f} s, {phase.tokens_per_s:.1f} tok/s"


def _latency(steps: tuple[float, ...]) -> str:
    p50, p90, p99 = (percentile(steps, percent) for percent in (50, 90, 99))
    text = f"p50 {p50 * 1e3:.2f} ms, p90 {p90 * 1e3:.2f}, p99 {p99 * 1e3:.2f}, max {max(steps) * 1e3:.2f}"
    if len(steps) >= TAIL_SAMPLES and p99 > TAIL_FACTOR * p50:
        text += f" (long tail: p99 is {p99 / p50:.1f} times p50)"
    return text


def _experts(phase: Phase, record: Record) -> str:
    part = 100 / phase.wanted
    text = (
        f"hit rate {phase.hit_rate:.1%} = pinned {phase.hits_pinned * part:.1f} + LRU {phase.hits_lru * part:.1f}"
        + f" + read ahead {phase.hits_prefetched * part:.1f}" * bool(phase.hits_prefetched)
        + f" + in the device's memory {phase.hits_device * part:.1f}" * bool(phase.hits_device)
        + f", loaded {phase.loads}"
    )
    if phase.joined:
        text += f", joined {phase.joined}"
    if phase.tokens and record.moe_layers:
        per_token = phase.loads / phase.tokens
        per_layer = per_token / record.moe_layers
        wanted = phase.wanted / phase.tokens / record.moe_layers
        text += f" ({per_token:.2f} loads per token, {per_layer:.2f} of {wanted:.2f} wanted per layer)"
    return text


def _shared(phase: Phase) -> str:
    return (
        f"{phase.hits_device} experts found on the device, {phase.on_host} computed by the CPU from"
        f" {_decimal(phase.on_host_bytes)}"
    )


def _ahead(record: Record) -> str:
    phase = record.decode
    known = phase.hits_prefetched + phase.prefetch_late + phase.prefetch_wasted
    if not known:
        return record.prefetch
    return (
        f"{record.prefetch}; of {known} experts in decode {phase.hits_prefetched / known:.0%} in time,"
        f" {phase.prefetch_late / known:.0%} under way when they were wanted, {phase.prefetch_wasted / known:.0%} for"
        f" nothing ({_decimal(phase.wasted_bytes)})"
    )


def _reads(phase: Phase) -> str:
    text = f"{_decimal(phase.read_bytes)}, {phase.read_bytes_per_token / 1e6:.2f} MB per token"
    cold = phase.cold_read_bytes
    if cold is not None:
        text += f", {cold / phase.read_bytes:.0%} of it from storage"
    if phase.read_busy_s:
        text += f", {phase.read_bytes_per_s / 1e9:.2f} GB/s"
        if phase.read_service_s:
            text += f", {phase.read_service_s / phase.read_busy_s:.1f} reads at once"
        if phase.wall_s:
            text += f", busy {phase.read_busy_s / phase.wall_s:.0%} of the time"
    return f"{text}; service {phase.read_service_s:.3f} s over all readers, waited {phase.read_wait_s:.3f} s"


def _memory(record: Record) -> str:
    memory = record.memory
    sizes = (
        ("anonymous", memory.anonymous_bytes),
        ("locked", memory.locked_bytes),
        ("mapped files", memory.mapped_bytes),
        ("peak with maps", memory.peak_resident_bytes),
        ("budget", memory.budget_bytes),
    )
    text = ", ".join(f"{label} {format_bytes(size)}" for label, size in sizes if size is not None) or "not told"
    if memory.budget_bytes is not None and memory.budget_source:
        text += f" ({memory.budget_source})"
    if memory.device_experts:
        text += f"; {memory.device_experts} experts in the device's memory"
    if memory.resident_experts:
        text += f"; {memory.resident_experts} experts in memory, {format_bytes(memory.resident_expert_bytes)}"
        text += f", {memory.pinned_experts} of them pinned" * bool(memory.pinned_experts)
        if memory.all_experts:
            left = memory.all_expert_bytes - memory.resident_expert_bytes
            text += f", {memory.all_experts - memory.resident_experts} on disk, {format_bytes(left)}"
        text += f", {memory.expert_slots} slots per layer" * bool(memory.expert_slots)
    return text


def _shares(phase: Phase) -> str:
    shares = sorted(phase.shares().items(), key=lambda item: -item[1])
    return ", ".join(f"{name.replace('_', ' ')} {share:.1%}" for name, share in shares if share >= 0.0005)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name.removesuffix('.-')} {count}" for name, count in counts.items())
