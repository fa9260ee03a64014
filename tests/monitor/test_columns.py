"""Columns of metrics that are read from a growing file, their exact average, and the windows of
values that are drawn per pixel.
"""

import json
import math
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.site import Site
from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.monitor.curves import Average, Curves, PlotRange, discounted_sum, pixel_edges
from kit.run import columns as columns_module
from kit.run.columns import Columns
from kit.run.metrics import Metrics
from tests.support.recorded_runs import lines, made, row, write


def line(step: int, attempt: int = 1, **values: object) -> str:
    return lines([row(step, attempt, tokens=1024, **values)])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def plainly(file: Path) -> tuple[list[dict], int]:
    """Returns (rows, number of invalid lines). Rows leave out the steps that a newer attempt
    repeated. Invalid lines are incomplete or in another format.
    """
    rows, skipped = [], 0
    for text in file.read_bytes().splitlines():
        try:
            row = json.loads(text)
            rows.append((int(row["step"]), int(row["attempt"]), row))
        except (ValueError, KeyError, TypeError, OverflowError):
            skipped += 1
    first: dict[int, int] = {}
    for step, attempt, _ in rows:
        first[attempt] = min(step, first.get(attempt, step))
    kept = {}
    for step, attempt, row in rows:
        if not any(newer > attempt and start <= step for newer, start in first.items()):
            kept[step] = row
    return [kept[step] for step in sorted(kept)], skipped


def assert_same_as_metrics(columns: Columns) -> None:
    rows, skipped = plainly(columns.file)
    spec, site = ModelSpec.preset("demo"), Site.load("laptop")
    metrics = Metrics.read(columns.file, spec=spec, plans={}, site=site)
    for name in ("step", "attempt", "loss", "time"):
        expected = np.array([float(row.get(name, np.nan)) for row in rows])
        np.testing.assert_array_equal(columns[name], expected, err_msg=name)
        np.testing.assert_array_equal(metrics[name], expected, err_msg=name)
    assert columns.skipped_lines == metrics.skipped_lines == skipped


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), max_size=40),
    cuts=st.lists(st.integers(1, 400), max_size=6),
)
def test_columns_read_in_pieces_equal_metrics(file, rows, cuts):
    text = "".join(line(step, attempt, loss=i) for i, (step, attempt) in enumerate(rows)).encode()
    file.write_bytes(b"")
    columns, start = Columns(file), 0
    for cut in [*cuts, len(text)]:
        with file.open("ab") as stream:
            stream.write(text[start : start + cut])
        start += cut
        columns.read_all()
    assert_same_as_metrics(columns.read_all())


def test_foreign_lines_are_skipped_and_counted(file):
    foreign = [
        '{"step": 3, "att',
        "[1, 2]",
        "",
        '{"step": null, "attempt": 1}',
        "\x00\x00",
        '"text"',
        '{"step": 1e400, "attempt": 1}',
        '{"attempt": 1}',
        '{"step": 5, "attempt": 1}{"step": 6, "attempt": 1}',
    ]
    strange = line(2, loss="high") + line(3, loss=math.nan) + line(4, loss=math.inf)
    file.write_text(line(1, loss=1.0) + "\n".join([*foreign, strange]))
    columns = Columns(file).read_all()
    assert columns["step"].tolist() == [1, 2, 3, 4] and columns.skipped_lines == len(foreign)
    assert str(columns["loss"].tolist()) == "[1.0, nan, nan, inf]"


def test_line_longer_than_a_read_is_skipped(file):
    """A line without an end must not be stored in memory."""
    file.write_text(line(1) + "x" * 5000 + "\n" + line(2))
    columns = Columns(file)
    while columns.poll(1000) or columns.position < file.stat().st_size:
        pass
    assert columns["step"].tolist() == [1, 2] and columns.skipped_lines >= 1


def test_fast_parser_reads_nan_losses(file, monkeypatch):
    monkeypatch.delattr(columns_module, "parse_rows")
    losses = ["NaN", *range(1, 20_000)]
    rows = [f'{{"step": {i}, "attempt": 1, "loss": {loss}}}\n' for i, loss in enumerate(losses)]
    file.write_text("".join(rows))
    assert np.isnan(Columns(file).read_all()["loss"]).sum() == 1


def test_fast_parser_equals_slow_one_without_pandas(file, monkeypatch):
    """The parser works without pandas, because importing pandas takes as long as reading half a
    million steps.
    """
    rows = [
        line(i, loss=i / 7, **({"checkpoint_s": 0.5} if i % 100 == 0 else {})).replace(
            '"grad_norm": ', f'"grad_norm": null, "x{i % 3}": '
        )
        for i in range(1, 20_001)
    ]
    file.write_text("".join(rows))
    code = "import sys; from kit.run.columns import *; Columns(Path(sys.argv[1])).read_all()"
    code = f"{code}; sys.exit('pandas' in sys.modules or 'pyarrow' not in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, file]).returncode == 0
    fast = Columns(file).read_all()
    monkeypatch.setattr(columns_module, "FAST_FROM_BYTES", math.inf)
    slow = Columns(file).read_all()
    for name in columns_module.NAMES:
        np.testing.assert_array_equal(fast[name], slow[name], err_msg=name)


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.floats(-1e3, 1e3) | st.just(float("nan")), min_size=1, max_size=400),
    decay=st.sampled_from([0.0, 0.3, 0.9, 0.999]),
    cut=st.integers(0, 400),
)
def test_average_is_exact_when_fed_in_parts(values, decay, cut):
    average = Average(decay)
    values = np.array(values)
    if cut:
        average.update(values[:cut])
    result = average.update(values)
    total = weight = 0.0
    for got, value in zip(result, values, strict=True):
        if np.isfinite(value):
            total, weight = decay * total + value, decay * weight + 1
        mean = total / weight if weight else np.nan
        assert got == pytest.approx(mean, rel=1e-9, abs=1e-9, nan_ok=True)


def test_discounted_sum_equals_plain_recurrence():
    values = np.random.default_rng(0).normal(size=70_001)
    expected = list(accumulate(values, lambda total, value: 0.99 * total + value, initial=5.0))[1:]
    np.testing.assert_allclose(discounted_sum(values, 0.99, 5.0), expected, atol=1e-9)


def test_plot_window_of_growing_run_keeps_every_spike(tmp_path):
    losses = np.zeros(100_000)
    losses[[17, 40_050, 50_000, 99_999]] = 9, 8, -5, 7
    losses[60_000:61_000] = np.nan
    run = made(tmp_path / "run", [], Plan(global_batch_size=2))
    told = [line(step, loss=loss) for step, loss in enumerate(losses.tolist(), 1)]
    views = (
        PlotRange(width=300),
        PlotRange(width=300, log_x=True),
        PlotRange(width=300, start=4e4, end=40_100.0),
    )
    curves, windows = [Curves(run) for _ in views], []
    for part in (told[:70_001], told[70_001:]):
        write(run, part)
        windows = [
            each.read_all().window(("loss",), asked)
            for each, asked in zip(curves, views, strict=True)
        ]
    for asked, (x, (low, high, _)) in zip(views, windows, strict=True):
        edges = pixel_edges(curves[0]["step"], asked)
        assert len(x) <= 300 and (edges[-1] - edges[0] == 100_000 or asked is views[2])
        parts = np.split(losses[: edges[-1]], edges[:-1])[1:]
        assert high.tolist() == pytest.approx([np.fmax.reduce(y) for y in parts], nan_ok=True)
        assert low.tolist() == pytest.approx([np.fmin.reduce(y) for y in parts], nan_ok=True)
    assert x[0] < 40_000 and x[-1] > 40_100 and high.max() == 8, "of the part that was asked for"


def test_curves_follow_new_attempt_and_clock_set_back(tmp_path):
    one = Plan(global_batch_size=2)
    run = made(tmp_path / "run", [], one.replace(data_parallel=2), one)
    curves = Curves(run, smoothing=0.5).read_all()
    x, values = curves.window(("loss", "mfu"), PlotRange(axis="time", width=10, log_x=True))
    assert x.shape == (0,) and values.shape == (6, 0)
    write(run, [line(i, time=1e9 + i - 100 * (i > 20)) for i in range(1, 31)])
    curves.read_all()
    assert np.all(np.diff(curves["time"]) >= 0) and curves["time"][-1] == 19
    curves.window(("loss",), PlotRange(axis="step", width=100))
    write(run, [line(11, attempt=2, loss=1.0)])
    curves.read_all()
    x, values = curves.window(("loss", "mfu"), PlotRange(axis="tokens", width=100))
    assert len(x) == 11 and x[-1] == 11 * 1024
    assert values.shape == (6, 11) and values[0, -1] == 1.0
    mfu = 2048 * run.spec.flops_per_token() / 1e11
    assert values[4].tolist() == pytest.approx([mfu / 2] * 10 + [mfu])
    coarse, _ = curves.window(("loss",), PlotRange(axis="step", width=3))
    assert (coarse[0], coarse[-1], len(coarse)) == (1, 11, 3), "from the first step to the last"
    np.testing.assert_allclose(values[2], Average(0.5).update(curves["loss"]))


@pytest.mark.parametrize("steps", [20, 4000])
def test_columns_of_a_hook_are_read(file, steps):
    """The short file is parsed by json, the long file by pyarrow. Attempt 2 repeats the last ten
    steps, without the hook. A validation loss by set first occurs at the last step.
    """
    texts = [line(step, **{"hook/norm": float(step), "note": "text"}) for step in range(1, steps)]
    texts += [line(step, 2) for step in range(steps - 10, steps)]
    file.write_text("".join(texts) + line(steps, 2, **{"validation/web": 3.5}))
    columns = Columns(file).read_all()
    first = np.arange(1.0, steps - 10)
    np.testing.assert_array_equal(columns["hook/norm"][: len(first)], first)
    assert np.isnan(columns["hook/norm"][len(first) :]).all() and len(columns) == steps
    assert columns["validation/web"][-1] == 3.5 and np.isnan(columns["validation/web"][:-1]).all()
    assert columns.recorded_names()[-2:] == ["hook/norm", "validation/web"]
    assert "note" not in columns.names and columns.skipped_lines == 0
    metrics = Metrics.of(columns, spec=ModelSpec.preset("demo"), plans={}, site=Site.load("laptop"))
    np.testing.assert_array_equal(metrics["hook/norm"], columns["hook/norm"])


def test_new_column_in_long_text_keeps_the_fast_parser(file, monkeypatch):
    """After the names are known, pyarrow parses the text. json parses only the first lines."""
    parsed, slow = [], columns_module.parse_rows
    monkeypatch.setattr(
        columns_module, "parse_rows", lambda text: parsed.append(text) or slow(text)
    )
    file.write_text("".join(line(step, **{"hook/norm": 1.5}) for step in range(1, 20_001)))
    assert Columns(file).read_all()["hook/norm"].tolist() == [1.5] * 20_000
    assert 0 < sum(map(len, parsed)) < 0.1 * file.stat().st_size


def test_number_and_names_of_columns_are_limited(file):
    many = {f"hook/{number}": 1.0 for number in range(1000)}
    strange = {
        "": 1.0,
        "x" * 101: 1.0,
        "a\nb": 1.0,
        "\ud800": 1.0,
        "flag": True,
        "nested": {"a": 1},
    }
    file.write_text(line(1, **strange) + line(2, **many) * 300 + line(3, **{"hook/late": 1.0}))
    columns = Columns(file).read_all()
    assert columns.names[len(columns_module.NAMES) :] == tuple(many)[:200]
    assert columns["step"].tolist() == [1, 2, 3] and columns.skipped_lines == 0


def test_sparse_series_is_drawn_without_average(tmp_path):
    """A number that one step in ten records is drawn as it is, and stays until the next one."""
    rows = [
        row(s, sets=s / 10) if s % 10 == 0 else row(s, dense=float(s % 2)) for s in range(1, 101)
    ]
    curves = Curves(made(tmp_path / "run", rows, Plan(global_batch_size=1)), 0.9).read_all()
    assert curves.further_names() == ["step_time_s", "tokens", "dense", "sets"]
    assert not curves.is_smoothed("sets") and curves.is_smoothed("dense")
    _, values = curves.window(("sets", "dense"), PlotRange())
    np.testing.assert_array_equal(values[2][[8, 9, 18, 19, 99]], [np.nan, 1, 1, 2, 10])
    assert np.isfinite(values[0]).sum() == 10
    assert values[5][98] == pytest.approx(0.5, abs=0.06)
