"""Where a model's usage history is kept, read at the start and written at the end of a run.

Knows files and the model's fingerprint; must not know how experts are cached. A history that cannot be read or written
is one notice, and never stops a run; one that the user named and that is of another model is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from picaflor.container.strict_json import show_path
from picaflor.errors import BadStateFile, WriteFailed
from picaflor.models.base import Model
from picaflor.models.loading import ModelIndex
from picaflor.runtime.machine import model_fingerprint, write_text
from picaflor.runtime.sidefile import read_text
from picaflor.store.mapped import MappedStore
from picaflor.store.policy.base import PolicyFactory
from picaflor.store.policy.choose import policies
from picaflor.store.policy.rankings import hottest
from picaflor.store.routes import RoutesWriter
from picaflor.store.store import ExpertStore
from picaflor.store.usage import Usage, is_coli

COLI_NAME = ".coli_usage"
MOST_BYTES = 64 << 20


class History:
    """One model's counts and their file. `path` None: nothing is kept.

    `named`: the user named the file. Raises BadStateFile then for a file that is of no use.
    """

    def __init__(
        self,
        path: Path | None,
        model: Model,
        index: ModelIndex,
        *,
        folder: Path,
        named: bool,
        warn: Callable[[str], None],
    ) -> None:
        self.path = path
        self.usage = Usage()
        self._family = model.family
        self._layers = len(model.layers)
        self._experts = {layer: len(found) for layer, found in index.experts.items()}
        self.warn = warn
        self._coli = path is not None and path.name == COLI_NAME
        if path is None:
            return
        try:
            found = self._read(path) or (None if named else self._read(folder / COLI_NAME))
        except BadStateFile as error:
            if named:
                raise
            warn(f"{error}; it is not used and not written to")
            self.path = None
            return
        self.usage = found or Usage()

    def _read(self, path: Path) -> Usage | None:
        text = read_text(path, most_bytes=MOST_BYTES, error=BadStateFile)
        if text is None:
            return None
        where = show_path(path)
        if is_coli(text):
            if path == self.path:
                self._coli = True
            return Usage.from_coli(text, where, layers=self._layers, experts=self._experts, family=self._family)
        usage = Usage.from_json(text, where)
        usage.check(self._experts, where)
        return usage

    def save(self, counts: Mapping[int, Sequence[int]], policy: str) -> None:
        """Add what a run counted and replace the file; nothing to add leaves it alone."""
        if self.path is None or not any(map(any, counts.values())):
            return
        self.usage.add(counts)
        self.usage.policy = policy
        text = self.usage.to_coli(layers=self._layers, family=self._family) if self._coli else self.usage.to_json()
        try:
            write_text(self.path, text)
        except WriteFailed as error:
            self.warn(f"usage history: {error}")


def history_file(state: Path | None, model: Model, index: ModelIndex, folder: Path) -> Path | None:
    """The file of a model under the folder of state: by the name of its folder, and by its sizes."""
    if state is None:
        return None
    name = re.sub(r"[^A-Za-z0-9._-]", "_", folder.resolve().name)[:80]
    return state / "usage" / f"{name}-{model_fingerprint(model, index)}.json"


class Learning:
    """What one run learns about routes, and what it knows from before: opened before the store, closed before it."""

    def __init__(self, history: History, policy: str, record: Path | None) -> None:
        self._history = history
        self._policy = policy
        self._record = record
        self._writer: RoutesWriter | None = None

    def policies(self) -> PolicyFactory:
        """The factory for the store; a contest starts with what won in the last run."""
        usage = self._history.usage
        return policies(self._policy, usage.layers, start=usage.policy)

    def begin(self, store: ExpertStore | MappedStore, *, model: str, experts_per_token: int) -> None:
        """Start to record, and to read pins where they are in force. Raises WriteFailed where routes cannot go."""
        if self._record is not None:
            self._writer = RoutesWriter(self._record, model, experts_per_token, store.files.routed())
            store.recorder = self._writer
        if isinstance(store, ExpertStore) and store.policy_in_force == "pins":
            store.warm({layer: hottest(counts, len(counts)) for layer, counts in self._history.usage.layers.items()})

    def end(self, store: ExpertStore | MappedStore) -> None:
        """Keep the history and end the recording; trouble is one notice each."""
        if isinstance(store, ExpertStore):
            self._history.save(store.asked_for, store.policy_in_force)
        store.recorder = None
        if self._writer is not None:
            self._writer.close()
            if self._writer.failure is not None:
                self._history.warn(str(self._writer.failure))
            self._writer = None
