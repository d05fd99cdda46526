"""`picaflor plan MODEL`: memory, placement and speed of a model before it is loaded, and what each change would give.

Must not know how any of it is found; runtime.sketch plans and runtime.forecast predicts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from picaflor import settings as table
from picaflor.cli.model import DEMO_LINE, engine_options, model_path
from picaflor.settings import Settings
from picaflor.sizes import format_bytes, format_rate

if TYPE_CHECKING:
    from picaflor.runtime.forecast import Change, Forecast
    from picaflor.runtime.predict import Speed
    from picaflor.runtime.sketch import Sketch
    from picaflor.store.routes import Routes

_ASSUMED = "assumed: 60 % of that rate, 90 us a layer, 400 us more where the processor has a part"
STATE_NAME = "machine.json"


@click.command()
@click.argument("model", required=False)
@click.option("--replay", "routes", type=click.Path(path_type=Path), help="Routes to replay, as --record-routes wrote.")
@click.option("--fresh", is_flag=True, help="Measure this machine anew instead of using what was measured earlier.")
@table.options("plan")
def command(model: str | None, routes: Path | None, fresh: bool, settings: Settings) -> None:
    """Predict how MODEL, a directory, would run here: memory, placement, speed, and what each change would give.

    Needs config.json and the headers of the files, so it works before the weights are here. Without MODEL it is the
    built-in one. No weight is multiplied; some experts are read to measure the disk.
    """
    from picaflor.models.config import Notices
    from picaflor.runtime import builtin
    from picaflor.runtime.forecast import forecast
    from picaflor.runtime.machine import StateFile
    from picaflor.runtime.sketch import sketch
    from picaflor.runtime.target import find_target

    path = model_path(model)
    if path is None:
        print(DEMO_LINE, file=sys.stderr, flush=True)
    notices = Notices(strict=settings.strict, warn=_warn)
    folder = table.state_folder()
    state = StateFile(folder / STATE_NAME if folder else None, warn=_warn)
    plan = sketch(path or builtin.folder(), engine_options(settings), notices)
    try:
        target = find_target(plan.device, plan.options, notices.tell) if plan.device else None
        found = forecast(
            plan,
            state,
            target=target,
            routes=_read_routes(routes) if routes is not None else None,
            memory_rate=settings.memory_rate,
            disk_rate=settings.disk_rate,
            fresh=fresh,
        )
        record = as_record(plan, found)
    finally:
        plan.close()
    if settings.json:
        print(json.dumps(record))
    else:
        for label, text in lines(record):
            print(f"{label:<10} {text}".rstrip())


def _read_routes(path: Path) -> Routes:
    from picaflor.store.routes import Routes

    return Routes.read(path)


def _warn(text: str) -> None:
    print(f"picaflor: warning: {text}", file=sys.stderr, flush=True)


def as_record(plan: Sketch, found: Forecast) -> dict[str, Any]:
    """All that the command knows, as JSON data: sizes in bytes, rates per second, None for what is not known."""
    from picaflor.runtime.plan import formats_in_words
    from picaflor.runtime.sketch import token_bytes

    ledger = plan.ledger
    slots = list(ledger.slots.values())
    reads = found.reads
    return {
        "kind": "plan",
        "model": str(plan.path),
        "description": f"{plan.model.family}, {len(plan.model.layers)} layers, {formats_in_words(plan.index)}",
        "context": plan.context,
        "threads": plan.threads,
        "threads_source": plan.threads_source,
        "isa": plan.isa,
        "budget_bytes": ledger.limit.nbytes,
        "sources": [
            {"name": s.name, "bytes": s.nbytes, "detail": s.detail, "unknown": s.unknown} for s in ledger.sources
        ],
        "needs": [{"name": item.name, "bytes": item.nbytes, "flag": item.flag} for item in ledger.items],
        "total_bytes": ledger.total_bytes,
        "experts": plan.experts,
        "expert_bytes": plan.expert_bytes,
        "slots_per_layer": [min(slots, default=0), max(slots, default=0)],
        "resident_experts": sum(min(ledger.slots[block.layer], block.router.experts) for block in plan.moe),
        "all_resident": ledger.all_resident,
        "bytes_per_token": token_bytes(plan.model, plan.index),
        "device": _device(found),
        "routes": found.routes_from,
        "rates": {
            "from": found.rates_from,
            "memory_bytes_per_s": found.compute.memory_bytes_per_s,
            "step_s": found.compute.step_s,
            "experts_s": found.compute.experts_s,
            "read_extra_s": list(reads.extra_s) if reads else None,
            "read_bytes_per_s": reads.bytes_per_s if reads else None,
            "read_from_storage": reads.storage_share if reads else None,
        },
        "speed": _speed(found.speed),
        "all_in_memory": _speed(found.ceiling),
        "changes": [_change(change) for change in found.changes],
        "warnings": list(plan.notices.messages),
    }


def _device(found: Forecast) -> dict[str, Any] | None:
    """The device of a plan for one, and where weights lie."""
    target, placed = found.target, found.placement
    if target is None or placed is None:
        return None
    return {
        "name": target.memory.name,
        "free_bytes": target.memory.free,
        "total_bytes": target.memory.total,
        "usable_bytes": placed.usable,
        "bytes_per_s": target.bytes_per_s,
        "from": target.said,
        "needs": [{"name": item.name, "bytes": item.nbytes} for item in placed.needs],
        "experts": {"device": placed.on_device, "ram": placed.in_ram, "disk": placed.on_disk},
        "expert_bytes": placed.device_bytes,
        "text": str(placed),
    }


def _speed(speed: Speed | None) -> dict[str, Any] | None:
    if speed is None:
        return None
    return {
        "tokens_per_s": speed.tokens_per_s,
        "hit_rate": speed.hit_rate,
        "read_bytes_per_token": speed.read_bytes,
        "seconds": dict(speed.seconds),
        "limit": speed.limit,
    }


def _change(change: Change) -> dict[str, Any]:
    return {"change": change.name, "speed": _speed(change.speed), "note": change.note}


def lines(record: dict[str, Any]) -> list[tuple[str, str]]:
    """(label, text) of each line for a person."""
    table_lines = [("model", f"{record['model']}: {record['description']}")]
    table_lines += _memory_lines(record)
    if record["device"]:
        table_lines.append(("device", record["device"]["text"]))
        table_lines.append(("", f"{record['device']['from']}; {_ASSUMED}"))
    table_lines.append(("threads", f"{record['threads']} ({record['threads_source']}), {record['isa']}"))
    table_lines += _speed_lines(record)
    for change in record["changes"]:
        table_lines.append(("change", _change_text(change, record["speed"])))
    return table_lines


def _memory_lines(record: dict[str, Any]) -> list[tuple[str, str]]:
    found = []
    for number, source in enumerate(record["sources"]):
        known = "unknown" if source["unknown"] else "no limit"
        size = known if source["bytes"] is None else format_bytes(source["bytes"])
        used = "  <- the smallest counts" if source["bytes"] == record["budget_bytes"] else ""
        found.append(("" if number else "memory", f"{source['name']:<8} {size:>9}  {source['detail']}{used}"))
    for number, item in enumerate(record["needs"]):
        flag = f"  ({item['flag']})" if item["flag"] else ""
        found.append(("" if number else "needs", f"{format_bytes(item['bytes']):>9}  {item['name']}{flag}"))
    left = record["budget_bytes"] - record["total_bytes"]
    found.append(("", f"{format_bytes(record['total_bytes']):>9}  in all, {format_bytes(left)} left"))
    if record["experts"] and not record["device"]:
        held, experts = record["resident_experts"], record["experts"]
        disk = "none is read while decoding" if record["all_resident"] else "the others are read from disk when wanted"
        found.append(("experts", f"{held} of {experts} in memory ({held / experts:.0%}), {disk}"))
    return found


def _speed_lines(record: dict[str, Any]) -> list[tuple[str, str]]:
    rates, speed = record["rates"], record["speed"]
    total = sum(record["bytes_per_token"].values())
    classes = ", ".join(f"{name} {size / 1e6:.1f}" for name, size in record["bytes_per_token"].items() if size > 5e4)
    text = f"memory {rates['memory_bytes_per_s'] / 1e9:.1f} GB/s, multiplying {total / rates['step_s'] / 1e9:.1f}"
    if rates["read_bytes_per_s"]:
        text += f", disk {rates['read_bytes_per_s'] / 1e9:.2f} GB/s"
        if rates["read_from_storage"] is not None and rates["read_from_storage"] < 0.5:
            text += f" ({1 - rates['read_from_storage']:.0%} of that from the page cache)"
    if record["device"]:
        text += f", device {record['device']['bytes_per_s'] / 1e9:.0f} GB/s"
    found = [("per token", f"{total / 1e6:.1f} MB of weights: {classes}"), ("rates", f"{text}; {rates['from']}")]
    if record["experts"] and not record["all_resident"]:
        found.append(("routes", record["routes"]))
    if speed is None:
        best = record["all_in_memory"]["tokens_per_s"]
        found.append(("speed", f"unknown without the disk's rate (--disk-rate); at most {format_rate(best)} tok/s"))
        return found
    parts = ", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in speed["seconds"].items() if value)
    text = f"{format_rate(speed['tokens_per_s'])} tok/s: {parts}"
    if record["device"]:
        text += f"; limited by {speed['limit']}"
    if speed["read_bytes_per_token"]:
        text += f"; hit rate {speed['hit_rate']:.1%}, {speed['read_bytes_per_token'] / 1e6:.1f} MB read per token"
    found.append(("speed", text))
    return found


def _change_text(change: dict[str, Any], now: dict[str, Any] | None) -> str:
    note = f"; {change['note']}" if change["note"] else ""
    if change["speed"] is None:
        return f"{change['change']}: {change['note'] or 'unknown without the disk rate'}"
    rate = change["speed"]["tokens_per_s"]
    gain = f" ({rate / now['tokens_per_s'] - 1:+.0%})" if now else ""
    return f"{change['change']}: {format_rate(rate)} tok/s{gain}{note}"
