"""A few rounds of the soaks, the same each time; scripts/soak goes on for as long as is wanted."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import soak_faults
import soak_kill
from soak_support import World, Wrong

from picaflor.errors import NoFiniteLogit
from picaflor.store.reader import Finished, Reader


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("world"))
    yield made
    made.restore()


@pytest.mark.parametrize("name", soak_kill.SCENARIOS)
def test_a_kill_leaves_nothing_broken(world: World, name: str) -> None:
    soak_kill.SCENARIOS[name](world, random.Random(1))


@pytest.mark.parametrize(
    ("name", "rounds"), [("reads", 6), ("cut", 3), ("replica", 4), ("full", 1), ("full-target", 1)]
)
def test_a_fault_is_a_line_and_no_token_differs(world: World, name: str, rounds: int) -> None:
    for seed in range(rounds):
        soak_faults.SCENARIOS[name](world, random.Random(seed))


def test_state_on_a_drive_without_room(world: World) -> None:
    if not soak_faults.tmpfs_allowed():
        pytest.skip("this user may not mount a small file system (unshare -rm)")
    soak_faults.full_drive(world, random.Random(0))


def test_output_without_room_is_one_line(world: World) -> None:
    line = f"{sys.executable} -m picaflor run 'The old house' -n 3 > /dev/full"
    done = world.command("-c", line, program=("sh",))
    done.expect(code=1, said=1)
    assert done.said == ("picaflor: error: stdout: No space left on device",)


def test_the_rounds_see_a_failed_read_that_is_taken_for_a_good_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = Reader.finish

    def trusting(self: Reader, outcome: Any) -> Finished:
        found = true(self, outcome)
        return Finished(found.ticket, found.nbytes, found.seconds, None)

    monkeypatch.setattr(Reader, "finish", trusting)

    def rounds() -> None:
        for seed in range(6):
            soak_faults.reads(world, random.Random(seed))

    with pytest.raises((Wrong, NoFiniteLogit)):
        rounds()
