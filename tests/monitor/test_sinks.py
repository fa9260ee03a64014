"""Sinks, which copy the metrics of a run to wandb or TensorBoard. The tests read the real files
with the packages that define them.
"""

import json
import math
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.job import JobSpec
from cluster.site import Site
from cluster.state import JobState
from cluster.submission import submit
from kit.errors import ConfigError, MissingPackageError
from kit.evaluate.report import EvalReport, Metric
from kit.monitor.export import copy_metrics
from kit.run import Run
from tests.evaluate.conftest import task_score
from tests.support.recorded_runs import STEPS, lines, row, write
from tests.support.waiting import eventually


def _wandb_history(folder: Path) -> dict[str, list[dict]]:
    """Returns a dict from each wandb run to its rows. Reads the offline files with wandb's own
    protocol buffers.
    """
    found = {}
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        # wandb reports that it has finished shortly before it writes the last block of its file.
        assert eventually(
            lambda file=file: any(r.HasField("exit") for r in _wandb_records(file)), 20
        )
        rows = [r.history.item for r in _wandb_records(file) if r.HasField("history")]
        found[file.stem] = [
            {item.key or item.nested_key[0]: json.loads(item.value_json) for item in row}
            for row in rows
        ]
    return found


def _wandb_records(file: Path) -> list[Any]:
    from wandb.proto import wandb_internal_pb2

    records = []
    for data in _records(file.read_bytes()):
        records.append(wandb_internal_pb2.Record())
        records[-1].ParseFromString(data)
    return records


def _records(data: bytes) -> list[bytes]:
    """Returns the records of a LevelDB log, the format of wandb's offline files. After a header of
    7 bytes it consists of blocks of 32 KiB.
    """
    found, part, position = [], b"", 7
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        length = int.from_bytes(data[position + 4 : position + 6], "little")
        kind = data[position + 6]
        if position + 7 + length > len(data):  # the last record is not yet complete
            break
        part += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a complete record, or the last part of a record
            found.append(part)
            part = b""
    return found


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the user's wandb settings from the environment, and refuses connections to other
    machines.
    """
    for name in ("WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    connect = socket.socket.connect

    def refuse(self: socket.socket, address: object) -> None:
        if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"a connection to {address}")
        connect(self, address)  # type: ignore[arg-type]

    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_wandb_gets_every_step_and_each_score_once(run, offline):
    pytest.importorskip("wandb")
    _write_scores(run, step=20, value=0.5)
    report = copy_metrics(run, "wandb", follow=False)
    assert (report.rows, report.attempts, report.skipped_lines) == (50, (1, 2), 3)
    first, second = _wandb_history(run.directory / "wandb").values()
    scores = first.pop(next(i for i, row in enumerate(first) if "eval/piqa/acc" in row))
    told = scores["step"], scores["eval/piqa/acc"], scores["eval/piqa/acc_stderr"]
    assert told == (20, 0.5, 0.01)
    for rows, steps in ((first, STEPS[1]), (second, STEPS[2])):
        assert [row["step"] for row in rows] == list(steps)
    assert [row["_step"] for row in second] == list(range(20)), "it only counts, and drops nothing"
    assert math.isnan(first[4]["loss"]) and first[5]["grad_norm"] == math.inf
    assert first[0]["tokens_per_s"] == pytest.approx(4096)
    assert first[0]["mfu"] < first[0]["hfu"] + 1e-12
    write(run, [lines([row(41, 2), row(42, 2)]) + '{"step": 43'])
    _write_scores(run, step=30, value=0.6)
    assert copy_metrics(run, "wandb", follow=False).rows == 2
    histories = _wandb_history(run.directory / "wandb").values()
    (again,) = [row for rows in histories for row in rows if row.get("eval/piqa/acc") == 0.6]
    assert again["step"] == 30
    assert sum(map(len, histories)) == 50 + 1 + 2 + 1, "the rest, as further parts"


def _write_scores(run: Run, *, step: int, value: float) -> None:
    score = task_score(metrics=(Metric(name="acc", value=value, stderr=0.01),))
    report = EvalReport(name=run.name, step=step, attempt=1, tokenizer_sha256="00", scores=(score,))
    report.write(run.directory / "eval" / f"step_{step:08d}.json")


def test_unusable_sink_is_refused_before_any_write(run, monkeypatch):
    """The two cases are an unknown wandb mode, and TensorBoard if its package is missing."""
    monkeypatch.setenv("WANDB_MODE", "onlin")
    with pytest.raises(ConfigError, match="Did you mean 'online'"):
        copy_metrics(run, "wandb", follow=False)
    for module in ("summary.writer.event_file_writer", "compat.proto.event_pb2"):
        monkeypatch.setitem(sys.modules, f"tensorboard.{module}", None)
    with pytest.raises(MissingPackageError, match=r"pip install -e '\.\[tensorboard\]'"):
        copy_metrics(run, "tensorboard", follow=False)
    assert not {"wandb", "tensorboard"} & {file.name for file in run.directory.iterdir()}


def test_tensorboard_has_a_curve_per_attempt(run):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    copy_metrics(run, "tensorboard", follow=False)
    write(run, [lines([row(41, 2, validation_loss=6.0)])])
    assert copy_metrics(run, "tensorboard", follow=False).rows == 1
    for attempt, steps in STEPS.items():
        folder = run.directory / "tensorboard" / f"attempt_{attempt:02d}"
        events = EventAccumulator(str(folder), {"scalars": 0})
        events.Reload()
        loss = events.Scalars("loss")
        assert [event.step for event in loss] == [*steps, *([41] if attempt == 2 else [])]
        assert loss[0].value == pytest.approx(8 - steps[0] / 20)
        assert loss[0].wall_time == 1e9 + steps[0]
        names = {"grad_norm", "learning_rate", "tokens_per_s", "mfu", "hfu"}
        assert names <= set(events.Tags()["scalars"])
    assert [event.value for event in events.Scalars("validation_loss")] == [6.0]


def test_sink_follows_a_live_job_to_its_end(run):
    pytest.importorskip("tensorboard")
    spec = JobSpec(name="live", run_dir=str(run.directory), argv=("sleep", "1.5"), num_processes=1)
    job, added = submit(spec, Site.load("laptop")), iter(range(41, 1000))

    def train(_: float) -> None:
        time.sleep(0.2)
        write(run, [lines([row(next(added), 2)])])

    report = copy_metrics(run, "tensorboard", idle=train)
    assert job.status().state == JobState.DONE and report.end == "everything is copied"
    assert report.rows == 50 + next(added) - 41, "the steps written while it looked are all there"


# When the folder is removed, TensorBoard's own writer thread raises an error. The sink must still
# end cleanly.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("to", ["wandb", "tensorboard"])
def test_sink_ends_cleanly_when_run_is_deleted(run, to, offline):
    import shutil

    pytest.importorskip(to)
    # The file job.json is damaged, so the state of the job is unknown and the sink continues.
    (run.directory / "job.json").write_text("{}")
    report = copy_metrics(run, to, poll_s=0, idle=lambda _: shutil.rmtree(run.directory))
    assert report.rows == 50 and "was deleted" in report.end and not run.directory.exists()
