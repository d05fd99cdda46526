"""How fast the model's files and their replicas can be read side by side: a few reads of an expert's size from each.

Knows files and times; must not know experts' places or policies.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Sequence

from picaflor.container.expert_file import BLOCK_BYTES
from picaflor.errors import ReadFailed
from picaflor.store.direct import reopen_direct
from picaflor.store.files import ShardFiles
from picaflor.store.mirror import Replica

PROBE_READS = 8


def measure_sources(
    container: ShardFiles, replicas: Sequence[Replica], *, nbytes: int, direct: bool
) -> tuple[float, ...]:
    """Bytes per second of the model's files and of each replica, all read at once, each from its biggest shard.

    `direct`: past the page cache where the file allows it; what the page cache holds counts as fast otherwise. A source
    that fails gets 0. Raises ReadFailed if all do.
    """
    sources: list[tuple[ShardFiles, int]] = []
    for files in (container, *replicas):
        held = [s for s in container.shards if not isinstance(files, Replica) or s.index in files]
        sources.append((files, max(held, key=lambda shard: shard.nbytes).index))
    rates = [0.0] * len(sources)

    def run(place: int) -> None:
        files, shard = sources[place]
        try:
            rates[place] = _rate(files, shard, nbytes, direct)
        except (OSError, ReadFailed):
            rates[place] = 0.0

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(sources))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not any(rates):
        raise ReadFailed(f"{container.shards[0].path}: no source of the mirror could be read")
    return tuple(rates)


def _rate(files: ShardFiles, shard: int, nbytes: int, direct: bool) -> float:
    """Bytes per second of PROBE_READS reads, spread over a shard."""
    info = files.shards[shard]
    size = min(-(-nbytes // BLOCK_BYTES), max(1, info.nbytes // BLOCK_BYTES)) * BLOCK_BYTES
    step = max(0, info.nbytes - size) // PROBE_READS // BLOCK_BYTES * BLOCK_BYTES
    with files.handle(shard) as handle, mmap.mmap(-1, size) as memory:
        opened = os.dup(handle)
        if direct:
            try:
                opened, plain = reopen_direct(handle, info.path), opened
                os.close(plain)
            except OSError:
                pass  # measured through the page cache, as it will be read
        try:
            started, done = time.perf_counter(), 0
            for number in range(PROBE_READS):
                done += os.preadv(opened, [memory], number * step)
            return done / max(time.perf_counter() - started, 1e-9)
        finally:
            os.close(opened)
