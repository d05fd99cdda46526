"""`picaflor mirror verify MODEL DIR`: whether a directory holds true copies of a model's shards.

Must not know how copies are compared; store.mirror does that.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from picaflor import settings as table
from picaflor.container.strict_json import show_path
from picaflor.errors import BadContainer
from picaflor.settings import Settings


@click.group()
def command() -> None:
    """Copies of a model on a second drive."""


@command.command()
@click.argument("model", metavar="MODEL")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--deep", is_flag=True, help="Compare every byte, not only sizes and headers.")
@table.options("mirror verify")
def verify(model: str, folder: Path, deep: bool, settings: Settings) -> None:
    """Compare the shards in DIR with those of MODEL, by file name: sizes, headers, and with --deep all bytes.

    Exit code 1 for the first that is no copy, named.
    """
    from picaflor.cli.model import Progress, counted, model_path, split_folders
    from picaflor.container.index import Container
    from picaflor.store.mirror import compare_bytes, open_replica

    path = model_path(model)
    assert path is not None
    progress = Progress()
    with Container.open(path, extra_dirs=split_folders(settings)) as container:
        replica = open_replica(container, folder.expanduser())
        try:
            difference = compare_bytes(container, replica, progress) if deep else None
        finally:
            progress.clear()
            replica.close()
        if difference is not None:
            raise BadContainer(
                f"mirror {show_path(difference.path)}: differs from the model's shard at byte {difference.offset}: "
                "copy it again"
            )
        total = len(container.shards)
        present = len(replica)
        nbytes = sum(shard.nbytes for shard in container.shards if shard.index in replica)
    if settings.json:
        print(json.dumps({"shards": total, "copies": present, "bytes": nbytes, "deep": deep, "ok": True}))
        return
    compared = "every byte" if deep else "sizes and headers"
    print(f"{folder}: {present} of {counted(total, 'shard')} are copies ({compared} compared)")
