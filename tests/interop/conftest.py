"""Fixtures: a log of another trainer, and the run that is imported from it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.site import Site
from kit.config.spec import ModelSpec
from kit.interop.logs.importers import ImportReport, import_log
from kit.run import Run
from kit.run.columns import NAMES

DEGREES = {"tensor_parallel": 1, "pipeline_parallel": 1, "data_parallel": 8}
Read = Callable[..., tuple[ImportReport, Run]]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "train.log"


@pytest.fixture
def read(log: Path) -> Read:
    """Returns a function that writes `text` to the log, if given, and imports the log. Its options
    `spec`, `plan`, ... set what the log does not state.
    """

    def read(text=None, site="lumi", model="", **options) -> tuple[ImportReport, Run]:
        if text is not None:
            log.write_text(text)
        changes = {name: options.pop(name, {}) for name in ("spec", "plan", "recipe", "import")}
        out, spec = log.parent / "run", ModelSpec.preset(model) if model else None
        report = import_log(log, out, site=Site.load(site), spec=spec, changes=changes, **options)
        return report, Run.open(out)

    return read


@pytest.fixture
def read_node(read: Read) -> Read:
    """Returns a function that imports a log that states neither model nor layout. The import gets
    the demo model and a layout on one node.
    """

    def node(text: str, batch: int | None = 8, **options: Any) -> tuple[ImportReport, Run]:
        plan = DEGREES | ({"global_batch_size": batch} if batch else {})
        return read(text, "frontier", "demo", plan=plan, **options)

    return node


def assert_told(report: ImportReport, run: Run, told: dict[str, Any]) -> None:
    """Asserts that the import's report and run have the values of `told`, by field name. A list has
    the values of all steps and must be equal, and NaN equals NaN.
    """
    metrics = run.metrics()
    found = report.to_dict() | run.plan.to_dict() | run.recipe.to_dict()
    found |= {name: metrics[name].tolist() for name in told.keys() & set(NAMES)}
    found["total_tokens"] = metrics.total_tokens.tolist()
    for name, value in told.items():
        if isinstance(value, list):
            value = pytest.approx(value, rel=0, abs=0, nan_ok=True)
        assert found[name] == value, name
