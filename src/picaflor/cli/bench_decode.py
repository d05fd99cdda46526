"""`picaflor bench decode MODEL`: decoding speed beside what memory allows, as a record that can be shared.

Must not know how a token is computed; runtime.bench measures.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from picaflor import settings as table
from picaflor.cli.model import Progress, counted, open_engine
from picaflor.errors import UsageError
from picaflor.settings import Settings
from picaflor.sizes import format_bytes

if TYPE_CHECKING:
    from picaflor.runtime.bench import DecodeBench
    from picaflor.runtime.engine import Engine


DEFAULT_SEED = 1
_TRAFFIC = ("hits_device", "on_host", "on_host_bytes", "sent", "sent_bytes")
_READS = ("hits_prefetched", "prefetch_late", "prefetch_wasted", "wasted_bytes", "read_wait_s", "read_service_s")


@click.command()
@click.argument("model", metavar="MODEL")
@click.option("--tokens", type=click.IntRange(min=1), default=64, help="Tokens per repeat. Default: 64.")
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=16, help="Tokens before them. Default: 16.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, help="Measured repeats. Default: 5.")
@click.option("--token-seed", type=click.IntRange(min=0), help="Seed of the random tokens that are fed. Default: 1.")
@click.option("--text", type=click.Path(path_type=Path), help="Feed this file's tokens instead of random ones.")
@click.option(
    "--quality-record",
    type=click.Path(path_type=Path),
    help="Record of an earlier run whose quality figures stand for this lossy mode, instead of --text.",
)
@click.option("--note", default="", help="A line for the record: machine, storage, commit.")
@table.options("bench decode")
def command(
    model: str,
    tokens: int,
    prompt_tokens: int,
    repeats: int,
    token_seed: int | None,
    text: Path | None,
    quality_record: Path | None,
    note: str,
    settings: Settings,
) -> None:
    """Decode fixed tokens with MODEL, a directory, and compare with the rate at which memory can be read.

    The tokens are fed, not sampled, so every configuration computes the same routes. Rates are medians over repeats;
    memory is read before each repeat and after the last one, in the same process and with as many threads; on a GPU it
    is the device's, a step has the draw of its token, and the place that limits is named. Where
    experts come from disk, so is the disk: random experts, with the reads under way that the engine has. A lossy mode
    gets no speed without a figure of its quality: measured on the tokens of --text, or from --quality-record.
    """
    from picaflor.runtime.bench import measure_decode
    from picaflor.runtime.plan import DEFAULT_CONTEXT

    line = Progress()
    _check_quality(settings, text, quality_record)
    if text is not None and token_seed is not None:
        raise UsageError("--token-seed is of random tokens and --text feeds those of a file: leave one of them out")
    seed = DEFAULT_SEED if token_seed is None else token_seed
    _check_context(prompt_tokens, tokens, settings.ctx or DEFAULT_CONTEXT)
    with open_engine(model, settings) as engine:
        _check_context(prompt_tokens, tokens, engine.context)
        earlier = _earlier_quality(engine, quality_record)
        read_rate = engine.memory_probe()
        ids = _token_ids(engine, prompt_tokens + tokens, seed, text)
        bench = measure_decode(
            engine,
            prompt=ids[:prompt_tokens],
            tokens=ids[prompt_tokens:],
            repeats=repeats,
            read_rate=read_rate,
            disk=engine.disk_limit(),
            progress=lambda done, total: line("repeat", done, total),
        )
        line.clear()
        record = _record(engine, bench, prompt_tokens, seed if text is None else None, note)
        record |= _device(engine)
        record |= _quality(engine, ids, prompt_tokens, earlier)
    if settings.json:
        print(json.dumps(record))
    else:
        _print(record)


def _check_quality(settings: Settings, text: Path | None, quality_record: Path | None) -> None:
    """Before anything is measured. Raises UsageError."""
    from picaflor.runtime.lossy import Lossy

    lossy = Lossy(settings.router_top_p, settings.experimental_expert_budget)
    if quality_record is not None and not lossy.active:
        raise UsageError(
            "--quality-record is for a lossy mode and none is active (--router-top-p, --experimental-expert-budget): "
            "leave it out"
        )
    if lossy.active and text is None and quality_record is None:
        raise UsageError(
            f"{', '.join(lossy.names())}: no speed of a lossy mode without a figure of its quality: give --text FILE,"
            " on whose tokens it is measured in this run, or --quality-record FILE"
        )


def _earlier_quality(engine: Engine, quality_record: Path | None) -> dict[str, Any] | None:
    """The quality figures of an earlier record, read before anything is measured. Raises UsageError."""
    from picaflor.runtime.damage import read_record

    if quality_record is None:
        return None
    return read_record(quality_record, model=engine.name, modes=engine.plan.lossy.names())


def _quality(engine: Engine, ids: list[int], prompt_tokens: int, earlier: dict[str, Any] | None) -> dict[str, Any]:
    """The active lossy modes and their damage; nothing where none is active."""
    modes = engine.plan.lossy.names()
    if not modes:
        return {}
    quality = earlier or engine.measure_damage(ids[:prompt_tokens], ids[prompt_tokens:]).record()
    return {"lossy_modes": list(modes), "quality": quality}


def _check_context(prompt_tokens: int, tokens: int, context: int) -> None:
    """Before anything is measured. Raises UsageError."""
    total = prompt_tokens + tokens
    if total > context:
        raise UsageError(
            f"--prompt-tokens {prompt_tokens} and --tokens {tokens} are {total} tokens and the context holds {context}:"
            " give fewer, or a larger --ctx"
        )


def _token_ids(engine: Engine, count: int, seed: int, text: Path | None) -> list[int]:
    from picaflor.runtime.bench import fixed_tokens
    from picaflor.runtime.evaluate import read_chunks

    if text is None:
        return [int(token) for token in fixed_tokens(engine.vocabulary, count, seed)]
    ids: list[int] = []
    for piece, _ in engine.tokenizer.encode_pieces(read_chunks(text)):
        ids += piece
        if len(ids) >= count:
            break
    else:
        raise UsageError(f"--text {text}: {len(ids)} tokens; {count} are needed")
    return ids[:count]


def _record(
    engine: Engine, bench: DecodeBench, prompt_tokens: int, token_seed: int | None, note: str
) -> dict[str, Any]:
    from picaflor.runtime.bench import RECORD_VERSION

    run = engine.record().to_json()
    decode = run["decode"]
    kept = ("model", "description", "backend", "isa", "precision", "threads", "readers", "moe_layers", "memory")
    from picaflor.runtime.machine import record_head

    return {
        **record_head("bench decode", version=RECORD_VERSION, note=note),
        **{name: run[name] for name in kept},
        "prompt_tokens": prompt_tokens,
        "token_seed": token_seed,
        "reads": engine.plan.reading.to_json() if engine.plan.store is not None else None,
        "hit_rate": decode["hit_rate"],
        "disk_bytes_per_token": decode["read_bytes_per_token"],
        "shares": decode["shares"],
        "prefetch": run["prefetch"],
        **{name: decode[name] for name in _READS},
        "wait_by_service": decode["read_wait_s"] / decode["read_service_s"] if decode["read_service_s"] else None,
        **bench.record(),
    }


def _device(engine: Engine) -> dict[str, Any]:
    """What a device had and was sent in the last repeat, the rates of the other places, and which one limits; nothing
    for the CPU."""
    from picaflor.telemetry.verdict import verdict

    if not engine.plan.backend.on_device:
        return {}
    engine.measure_memory_limit()
    record = engine.record()
    found, decode = verdict(record), record.decode
    return {
        "device": {
            "experts": record.memory.device_experts,
            "all_experts": record.memory.all_experts,
            **{name: getattr(decode, name) for name in _TRAFFIC},
        },
        "link_bytes_per_s": record.link_bytes_per_s,
        "host_memory_bytes_per_s": record.host_memory_bytes_per_s,
        "verdict": {"kind": found.kind, "text": found.text},
        "fallbacks": dict(record.fallbacks),
    }


def _where(there: dict[str, int], tokens: int) -> str:
    """Which experts the device had, and what became of the others."""
    held = f"experts on the device: {there['experts']} of {there['all_experts']}"
    if there["experts"] == there["all_experts"]:
        return held
    return (
        f"{held}; in {tokens} tokens {there['hits_device']} were found there, the CPU computed {there['on_host']},"
        f" {there['sent']} were sent"
    )


def _print(record: dict[str, Any]) -> None:
    """The figures in a few lines."""
    print(
        f"{record['model']}: {record['tokens_per_s']:.2f} tokens/s, median of {record['repeats']} x {record['tokens']}"
        f" tokens ({record['tokens_per_s_min']:.2f} to {record['tokens_per_s_max']:.2f});"
        f" step p50 {1e3 * record['step_p50_s']:.2f} ms, p99 {1e3 * record['step_p99_s']:.2f} ms"
    )
    if "quality" in record:
        quality = record["quality"]
        print(
            f"LOSSY, {', '.join(record['lossy_modes'])}: mean KL {quality['mean_kl']:.4g} nats, the most likely token"
            f" stays in {quality['same_top']:.1%} of {quality['tokens']} tokens,"
            f" {quality['dropped']:.1%} of the experts left out"
        )
    setup = f"{record['backend']} {record['isa']}, {counted(record['threads'], 'thread')}, {record['precision']}"
    if record["hit_rate"] is not None:
        setup += f"; hit rate {record['hit_rate']:.1%}"
    print(f"{setup}; {format_bytes(round(record['disk_bytes_per_token'] or 0))} from disk per token")
    if "device" in record:
        print(_where(record["device"], record["tokens"]))
    where = "device memory copied" if "device" in record else "memory read"
    print(
        f"weights per token {format_bytes(record['bytes_per_token'])}, {where} at"
        f" {record['read_bytes_per_s'] / 1e9:.1f} GB/s: floor {record['floor_tokens_per_s']:.1f} tokens/s,"
        f" reached {record['of_floor']:.2f} of it"
    )
    if "of_disk" in record:
        physical = record["physical_of_logical"]
        share = "" if physical is None else f"; the system fetched {physical:.2f} of the bytes read"
        print(
            f"disk {record['disk_bytes_per_s'] / 1e9:.2f} GB/s ({record['reads']['mode']}, {record['reads']['engine']},"
            f" depth {record['reads']['depth']}): used {record['read_rate_from_disk'] / 1e9:.2f} GB/s, reached"
            f" {record['of_disk']:.2f} of it{share}"
        )
        known = record["hits_prefetched"] + record["prefetch_late"] + record["prefetch_wasted"]
        ahead = f"; of {known} experts {1 - record['prefetch_wasted'] / known:.0%} were wanted" if known else ""
        print(f"read ahead {record['prefetch']}{ahead}")
    if "verdict" in record:
        print(record["verdict"]["text"])
