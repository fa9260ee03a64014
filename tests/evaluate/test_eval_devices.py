"""`kit eval --devices`: the parallel layout of the scored model, and several ranks that give the
scores of one process.
"""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from cluster.site import Fact, Site
from kit.cli.app import app
from kit.config.spec import ModelSpec
from kit.errors import ConfigError, RunError
from kit.evaluate import EvalReport, Options, evaluate, report_file
from kit.evaluate.devices import HEADROOM, layout
from kit.evaluate.follow import has_scores
from kit.evaluate.scoring import check_request
from kit.launcher import eval_job
from kit.monitor import eval_curve
from kit.monitor.scores import ScoreFollower
from kit.run import Run
from tests.evaluate.conftest import SPEC
from tests.support.workers import run_ranks

# This warning is expected: the tests save checkpoints without a process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

FRONTIER, LAPTOP = Site.load("frontier"), Site.load("laptop")


@pytest.mark.parametrize(
    ("model", "site", "options", "expected"),
    [
        ("hlat-7b", "frontier", {}, "tensor 1 x replicas 1"),
        ("hlat-7b", "frontier", {"devices": 8}, "tensor 1 x replicas 8"),
        ("hlat-70b", "frontier", {}, "tensor 8 x replicas 1"),
        ("hlat-70b", "frontier", {"precision": "bf16"}, "tensor 4 x replicas 1"),
        ("hlat-70b", "frontier", {"precision": "bf16", "devices": 16}, "tensor 4 x replicas 4"),
        ("gpt-175b", "frontier", {"precision": "bf16"}, "FSDP 7 x replicas 1"),
        ("gpt-175b", "frontier", {}, "FSDP 24 x replicas 1"),
        ("gpt-1t", "frontier", {"precision": "bf16"}, "FSDP 80 x replicas 1"),
        ("demo", "laptop", {}, "tensor 1 x replicas 1"),
        ("demo", "laptop", {"devices": 2}, "tensor 1 x replicas 2"),
    ],
)
def test_eval_layout_follows_size_of_weights(model, site, options, expected):
    spec, given = ModelSpec.preset(model), Options.of(options)
    found = layout(spec, Site.load(site), given)
    assert str(found) == expected
    asked = dataclasses.replace(given, devices=None)
    assert layout(spec, Site.load(site), asked, found.num_devices) == found


@pytest.mark.parametrize(
    ("devices", "precision", "ranks", "message"),
    [
        (2, "fp32", 1, "devices: 2 cannot share hlat-70b: 275.9 GB of w.* in fp32.*68.7 GB, 8 a"),
        (12, "fp32", 1, "devices: 12 cannot share .*whole nodes"),
        (3, "bf16", 1, "tensor ranks in a node: 1, 2, 4, 8; beyond one node"),
        (4, "fp32", 2, "devices: 4 were asked for, but 2 processes were started"),
    ],
)
def test_impossible_eval_device_count_is_refused(devices, precision, ranks, message):
    with pytest.raises(ConfigError, match=message):
        spec, options = ModelSpec.preset("hlat-70b"), {"devices": devices, "precision": precision}
        layout(spec, FRONTIER, Options.of(options), ranks)


def test_unsupported_model_or_small_site_is_refused():
    spec = ModelSpec.preset("demo").replace(positions="learned")
    with pytest.raises(ConfigError, match="spec.positions: Hugging Face's Llama has 'rotary' only"):
        layout(spec, LAPTOP, Options())
    memory = Fact(value=1e6, source="made up")
    small = FRONTIER.replace(device=FRONTIER.device.replace(memory_bytes=memory))
    with pytest.raises(ConfigError, match="devices: no number"):
        layout(ModelSpec.preset("hlat-7b"), small, Options())


def with_memory(run: Run, share: float) -> Run:
    """Returns the run on a site with two devices. Their total memory is `share` times the memory
    that scoring needs.
    """
    memory = Fact(value=share * HEADROOM * 4 * SPEC.num_params / 2, source="made up")
    site = LAPTOP.replace(devices_per_node=2, device=LAPTOP.device.replace(memory_bytes=memory))
    site.write(run.directory / "site.json")
    return Run.open(run.directory)


def scored(run: Run, benchmarks, **options) -> EvalReport:
    return evaluate(run, tasks=("heldout", "piqa"), task_data=benchmarks, **options)


def values(report: EvalReport) -> list[float]:
    return [metric.value for task in ("heldout", "piqa") for metric in report[task].metrics]


@pytest.mark.parametrize(("share", "tensor"), [(1.5, 2), (2.5, 1)])
def test_two_ranks_score_as_one_process(run, benchmarks, share, tensor):
    """Only the first rank writes the report, which must equal the report of one process."""
    expected = values(scored(run, benchmarks))
    report_file(run, 3).unlink()
    run = with_memory(run, share)
    assert layout(run.spec, run.site, Options(devices=2)).shards == tensor
    for report in run_ranks(2, scored, run, benchmarks):
        assert values(report) == pytest.approx(expected, abs=1e-5)
    kept = EvalReport.read(report_file(run, 3))
    assert values(kept) == values(report) and kept["piqa"].seconds > 0


def test_bf16_and_fp32_scores_are_both_kept(run, benchmarks):
    fp32, bf16 = scored(run, benchmarks), scored(run, benchmarks, precision="bf16")
    assert 0 < abs(fp32["heldout"].metrics[0].value - bf16["heldout"].metrics[0].value) < 0.05
    kept = EvalReport.read(report_file(run, 3))
    assert sorted((score.task, score.precision) for score in kept.scores) == [
        (task, precision) for task in ("heldout", "piqa") for precision in ("bf16", "fp32")
    ]
    assert ", bf16" in kept.to_text()
    names = ["heldout", "piqa", "heldout, bf16", "piqa, bf16"]
    assert [curve.name for curve in eval_curve(run)] == names
    followed = ScoreFollower(run).read()[0][2]
    assert {"eval/heldout/bits_per_byte", "eval/heldout_bf16/bits_per_byte"} <= set(followed)
    requests = check_request(("heldout",))
    given = Options(task_data=benchmarks)
    half = tuple(score for score in kept.scores if score.precision == "bf16")
    kept.replace(scores=half).write(report_file(run, 3))
    assert has_scores(run, 3, requests, dataclasses.replace(given, precision="bf16"))
    assert not has_scores(run, 3, requests, given)
    scored(run, benchmarks)
    assert len(EvalReport.read(report_file(run, 3)).scores) == 4


def test_eval_on_two_devices_runs_a_job(run, benchmarks, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    scored(run, benchmarks, limit=4)  # the report has 4 items of piqa, and a score of another task
    run = with_memory(run, 1.5)
    asked = "--tasks piqa --limit 5 --set devices=2 --task-data".split()
    command = ["eval", str(run.directory), *asked, str(benchmarks)]
    answer = CliRunner().invoke(app, command, catch_exceptions=False)
    assert "on 2 devices of laptop: tensor 2 x replicas 1" in answer.stderr
    assert "piqa" in answer.stdout and "heldout" not in answer.stdout, "what was asked for"
    job = json.loads((run.directory / "eval" / "jobs" / "step_00000003" / "job.json").read_text())
    assert job["num_processes"] == 2
    scores = EvalReport.read(report_file(run, 3)).scores
    assert [score.num_items for score in scores if score.task == "piqa"] == [5]


def test_failed_eval_job_error_has_its_last_output(run, benchmarks, monkeypatch):
    run = with_memory(run, 1.5)
    argv = ("/bin/sh", "-c", "echo bad luck; exit 3")
    failing = eval_job(run, 3, ["--tasks", "piqa"], 2).replace(argv=argv)
    monkeypatch.setattr("kit.launcher.eval_job", lambda *_: failing)
    message = "step 3: not scored: bad luck. All that it said: .*kit logs"
    with pytest.raises(RunError, match=message):
        scored(run, benchmarks, devices=2)
