import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster.site import Site
from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.estimate.tuning.tune import TrialFailure, tune
from kit.papers import PaperFigure
from kit.papers.frontier_demo import SEARCH, SPACE
from kit.papers.hlat_demo import AVERAGING_SCHEDULES, PRECISIONS
from kit.papers.hlat_model import TRN1
from kit.papers.hlat_training import AVERAGING, PRECISION
from tests.papers import recorded
from tests.papers.recorded import PLAN_175B, cluster_run, demo_study, record, score, scored

PIPELINE_RATES = {(1, 2, 1): 1e3, (1, 2, 2): 1.3e3, (1, 2, 4): 1.6e3, (1, 2, 8): 1.8e3}
PIPELINE_RATES |= {(2, 1, 4): 900.0}
"""Tokens per second by (tensor parallelism, pipeline parallelism, number of micro-batches) of an
invented machine. The observations of the Frontier paper hold on this machine. With one micro-batch,
half of the time is pipeline bubble."""


def _two_ranks(parameters: dict) -> float:
    if parameters["tensor_parallel"] * parameters["pipeline_parallel"] > 2:
        raise TrialFailure("4 devices do not divide 2")
    return 900.0 / parameters["tensor_parallel"]


@pytest.fixture(scope="package", autouse=True)
def drawn_once() -> Iterator[dict]:
    """Caches drawn figures by title and runs for all tests of the package. Yields the cache. A test
    that clears the cache makes a figure be drawn again.
    """
    known: dict[tuple, Any] = {}
    draw = PaperFigure.draw

    def remembered(figure: PaperFigure, runs: Sequence = (), **options: Any) -> Any:
        if options:
            return draw(figure, runs, **options)
        key = figure.title, *map(str, runs)
        if key not in known:
            known[key] = draw(figure, runs)
        return known[key]

    with pytest.MonkeyPatch.context() as here:
        here.setattr(PaperFigure, "draw", remembered)
        yield known


@pytest.fixture(scope="session")
def frontier_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Returns three run directories: a run on a cluster, a run imported from a log, and the
    demo-scale study with its search.
    """
    folder = tmp_path_factory.mktemp("frontier")
    study, log = demo_study(folder / "demo", PIPELINE_RATES), folder / "imported"
    plan = PLAN_175B | {"data_parallel": 4, "global_batch_size": 1280}
    tune(_two_ranks, SPACE, num_trials=8, sampler="random", storage=study / SEARCH)
    return [
        cluster_run(folder / "cluster").directory,
        recorded.imported_run(log, "frontier", "gpt-175b", 220, **plan).directory,
        study,
    ]


def _arm() -> list[dict]:
    """Returns the logged steps of one run of the precision study, which trains one model in several
    precisions.
    """
    common = {"grad_norm": 1.0, "learning_rate": 1e-3, "loss": 6.0}
    return [
        common | {"step": step, "validation_loss": 5.1 if step % 10 == 0 else None}
        for step in range(1, 101)
    ]


@pytest.fixture(scope="session")
def hlat_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Returns two folders: a run on Trainium, and a folder with a scored run and the demo-scale
    study.
    """
    folder = tmp_path_factory.mktemp("hlat")
    degrees: dict[str, Any] = {"tensor_parallel": 8, "data_parallel": 64, "zero_stage": 1}
    plan = Plan(**degrees, global_batch_size=1024, precision="bf16")
    spec, site = ModelSpec.preset("hlat-7b"), Site.load(TRN1)
    trn1 = record(folder / "trn1", spec, plan, site, 16 * 24_000.0)
    whole = [score("piqa", 0.6, items=100), score("boolq", 0.6, items=100, metric="acc")]
    scored(trn1, *whole, step=8)
    demo = folder / "study"
    run = record(demo / "llama-demo", ModelSpec.preset("demo"), Plan(), Site.load("laptop"), 1000.0)
    for step in (4, 8):
        bits = score("heldout", 3 - step / 10, metric="bits_per_byte")
        scored(run, score("piqa", 0.5 + step / 100), bits, step=step)
    (demo / PRECISION).write_text(json.dumps(dict.fromkeys(PRECISIONS, _arm())))
    losses = [{"step": step, "1": 6.0, "2": 5.9, "3": 5.8, "5": 5.9} for step in (100, 200)]
    (demo / AVERAGING).write_text(json.dumps(dict.fromkeys(AVERAGING_SCHEDULES, losses)))
    return [trn1.directory, demo]
