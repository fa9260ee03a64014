"""`kit profile`: steps of a running job are recorded on the ranks that were asked for, and read back as a table."""

import gzip
import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.site import Site
from cluster.state import ask
from kit.commands.app import app
from kit.errors import ConfigError, RunError
from kit.plan import Plan
from kit.run import Run
from kit.run.profile import MAX_STEPS, ask_profile, operators, profiles, request_file, trace_file
from tests.faults.attempts import Attempt

DP2 = Plan(data_parallel=2, zero_stage=1, micro_batch_size=2, global_batch_size=8)


@pytest.fixture
def run(tmp_path, spec, recipe) -> Run:
    long = recipe.replace(num_steps=100_000, checkpoint_every=None)
    return Run.create(tmp_path / "run", spec=spec, plan=DP2, recipe=long, site=Site.load("laptop"))


def until_profiles(run: Run, count: int, attempt: Attempt) -> None:
    deadline = time.monotonic() + 60
    while len(profiles(run.directory)) < count:
        assert time.monotonic() < deadline and not attempt.is_over(), attempt.log()
        time.sleep(0.05)


def until_taken(run: Run, attempt: Attempt) -> None:
    while request_file(run.directory).exists():
        assert not attempt.is_over(), attempt.log()
        time.sleep(0.02)


def test_a_running_job_leaves_traces_of_the_ranks_asked_for(run):
    attempt = Attempt(run)
    attempt.until_step(3)
    assert not (run.directory / "profile").exists()
    ask_profile(run, 3, [1])
    until_profiles(run, 1, attempt)
    request_file(run.directory).touch()  # damaged: dropped, and training goes on
    (folder, first), *_ = profiles(run.directory)
    assert folder.name == f"step_{first.first_step}" and (first.num_steps, first.ranks) == (3, (1,))
    assert not trace_file(folder, 0).exists()
    events = json.loads(gzip.decompress(trace_file(folder, 1).read_bytes()))["traceEvents"]
    optimizer_steps = [event for event in events if event["name"].startswith("Optimizer.step#")]
    assert len(optimizer_steps) == 3, "three steps, no more and no less"

    until_taken(run, attempt)
    shown = CliRunner().invoke(app, ["profile", str(run.directory), "--last"])
    assert shown.exit_code == 0 and "Rank 1" in shown.output and "aten::" in shown.output, shown.output
    told = json.loads(CliRunner().invoke(app, ["profile", str(run.directory), "--last", "--json"]).output)
    assert [len(rows) for rows in told["operators"].values()] == [10]
    ask_profile(run, MAX_STEPS, [0])
    until_taken(run, attempt)
    ask(run.directory, "stop")
    assert attempt.wait() == [0, 0], attempt.log()
    second = profiles(run.directory)[-1][1]
    assert 1 <= second.num_steps <= MAX_STEPS and second.ranks == (0,)
    steps = run.metrics()["step"].tolist()
    assert steps == list(range(1, len(steps) + 1)) and first.first_step < second.first_step <= len(steps)

    refused = CliRunner().invoke(app, ["profile", str(run.directory)])
    assert refused.exit_code != 0 and len(profiles(run.directory)) == 2, "nobody would read a request"


def write(file: Path, *events: dict) -> Path:
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": list(events)}).encode()))
    return file


def call(name: str, ts: float, dur: float, *, cat: str = "cpu_op", tid: int = 1) -> dict:
    return {"ph": "X", "pid": 1, "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid}


def test_an_operator_has_its_own_time_without_what_it_calls(tmp_path):
    nested = [call("linear", 0, 10), call("mm", 1, 6), call("copy", 2, 1), call("mm", 7, 2), call("linear", 10, 5)]
    beside = [call("mm", 3, 4, tid=2), call("step", 0, 99, cat="user_annotation")]
    found = operators(write(tmp_path / "trace.json.gz", *nested, *beside))
    assert [(name, calls, round(1e6 * seconds, 6)) for name, calls, seconds in found] == [
        ("mm", 3, 11), ("linear", 2, 7), ("copy", 1, 1)
    ]  # fmt: skip


def test_kernels_count_where_a_gpu_was_at_work(tmp_path):
    trace = write(tmp_path / "trace.json.gz", call("mm", 0, 10), call("gemm_kernel", 2, 30, cat="kernel", tid=7))
    assert [operator.name for operator in operators(trace)] == ["gemm_kernel"]


def test_a_damaged_trace_is_told(tmp_path):
    trace = write(tmp_path / "trace.json.gz", call("mm", 0, 10))
    trace.write_bytes(trace.read_bytes()[:-12])
    for file in (trace, tmp_path / "none.json.gz"):
        with pytest.raises(RunError, match="cannot be read as a trace"):
            operators(file)


@pytest.mark.parametrize(("steps", "ranks"), [(0, [0]), (MAX_STEPS + 1, [0]), (3, [2]), (3, [-1]), (3, [])])
def test_impossible_requests_are_refused(run, steps, ranks):
    with pytest.raises(ConfigError, match="is not allowed. Give"):
        ask_profile(run, steps, ranks)
    assert not request_file(run.directory).exists()


def test_neuron_cores_are_refused_by_name(run):
    run.plan = run.plan.replace(engine="neuron")
    with pytest.raises(ConfigError, match="neuron-profile"):
        ask_profile(run, 3, [0])
