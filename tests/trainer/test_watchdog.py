"""Watchdog of a rank, which ends a rank whose training step hangs. The watchdog works even if the
file system hangs too, which may be the cause.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.trainer import watchdog
from kit.trainer.watchdog import MANY_LIMIT_S, Watchdog, patience_s
from tests.trainer.steps import done


def test_hang_timeout_grows_with_the_number_of_ranks():
    """By default, many ranks get a longer limit. A value of `hung_after_s` in the recipe replaces
    this default.
    """
    recipe, many = Recipe(data="data", num_steps=1), Plan(data_parallel=65, global_batch_size=65)
    assert [patience_s(recipe, plan) for plan in (Plan(), many)] == [150.0, MANY_LIMIT_S]
    for asked in (None, 90.0):
        assert patience_s(recipe.replace(hung_after_s=asked), many) == asked


def end_of_a_rank(monkeypatch, log: Path, act: Callable[[Watchdog], Any], **settings: Any) -> int:
    """Runs `act` in a forked process with a watchdog that checks every 0.02 s. Returns the exit
    code of the process. Its standard error is written to `log`.
    """
    monkeypatch.setattr(watchdog, "TICK_S", 0.02)
    if (pid := os.fork()) == 0:
        os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY), 2)
        watchdog.faulthandler.dump_traceback = lambda **_: None
        watchdog.sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        usual = {"rank": 0, "alive": lambda: None, "store_heartbeat_times": lambda: None}
        usual["silent_ranks"] = list
        dog = Watchdog(**usual | settings)
        dog.start()
        act(dog)
        time.sleep(30)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(
    ("silent", "said"), [([3], "rank 3 no longer answers"), (None, ": the stacks"), ("hangs", "")]
)
def test_watchdog_ends_rank_while_files_hang(monkeypatch, tmp_path, silent, said):
    monkeypatch.setattr(watchdog, "REPORT_WAIT_S", 0.3)
    settings = {
        "limit_s": 0.2,
        "silent_ranks": lambda: time.sleep(60) if silent == "hangs" else silent,
    }
    log = tmp_path / "log"
    assert end_of_a_rank(monkeypatch, log, lambda dog: dog.after_step(done(0.001)), **settings) == 1
    text = (tmp_path / "log").read_text()
    assert said in text and bool(text) == (silent != "hangs")


@pytest.mark.parametrize("rank", [0, 1])
def test_collectives_are_dumped_before_any_rank_ends(monkeypatch, tmp_path, rank):
    monkeypatch.setattr(watchdog, "DUMP_WAIT_S", 0.2)
    monkeypatch.setattr(watchdog, "OTHERS_WAIT_S", 0.4)

    def dump() -> None:
        (tmp_path / f"trace{len(list(tmp_path.iterdir()))}").touch()
        time.sleep(30)

    def act(dog: Watchdog) -> None:
        # The first step compiles, so its long duration does not raise the limit.
        dog.after_step(done(100.0))

    settings = {"limit_s": 0.1, "rank": rank, "dump": dump}
    assert end_of_a_rank(monkeypatch, tmp_path / "log", act, **settings) == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["log", "trace1"]


def test_watchdog_does_not_fire_while_torch_compiles(monkeypatch, tmp_path):
    def act(dog: Watchdog) -> None:
        dog.after_step(done(0.001))
        dog.compile_begins()
        time.sleep(1)
        dog.compile_ends()
        os._exit(7)

    assert end_of_a_rank(monkeypatch, tmp_path / "log", act, limit_s=0.2) == 7
