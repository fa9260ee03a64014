"""Columns that grow with a metrics file, the exact average, and windows per pixel."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.site import Site
from kit.monitor.curves import Average, Curves, View, discounted_sum, pixel_edges
from kit.plan import Plan
from kit.run import columns as columns_module
from kit.run.columns import NAMES, Columns
from kit.run.metrics import Metrics
from kit.spec import ModelSpec
from tests.monitor.recorded import lines, made, row


def line(step: int, attempt: int = 1, **values: object) -> str:
    return lines([row(step, attempt, tokens=1024, **values)])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def plainly(file: Path) -> tuple[list[dict], int]:
    """Returns what a file holds by the rule, line by line, and how many lines were torn or
    foreign.
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


ONE_FILE = [HealthCheck.function_scoped_fixture]


@settings(max_examples=60, deadline=None, suppress_health_check=ONE_FILE)
@given(
    rows=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), max_size=40),
    cuts=st.lists(st.integers(1, 400), max_size=6),
)
def test_any_order_of_attempts_and_steps_in_any_pieces_is_what_metrics_reads(
    file, rows, cuts
) -> None:
    text = "".join(line(step, attempt, loss=i) for i, (step, attempt) in enumerate(rows)).encode()
    file.write_bytes(b"")
    columns = Columns(file)
    start = 0
    for cut in [*cuts, len(text)]:
        with file.open("ab") as stream:
            stream.write(text[start : start + cut])
        start += cut
        columns.read_all()
    with file.open("ab") as stream:
        stream.write(text[start:])
    assert_same_as_metrics(columns.read_all())


def test_foreign_lines_are_skipped_and_counted(file: Path) -> None:
    foreign = [
        '{"step": 3, "att\n',
        "[1, 2]\n",
        "\n",
        '{"step": null, "attempt": 1}\n',
        "\x00\x00\n",
        '"text"\n',
        '{"step": 1e400, "attempt": 1}\n',
        '{"attempt": 1}\n',
        '{"step": 5, "attempt": 1}{"step": 6, "attempt": 1}\n',
    ]
    strange = line(2, loss="high") + line(3, loss=float("nan"))
    file.write_text(line(1) + "".join(foreign) + strange + line(4))
    columns = Columns(file).read_all()
    assert columns["step"].tolist() == [1, 2, 3, 4]
    assert columns.skipped_lines == len(foreign)
    assert np.isnan(columns["loss"][1:3]).all() and np.isfinite(columns["loss"][[0, 3]]).all()


def test_a_chunk_with_nan_is_still_read_fast_and_infinity_stays(file: Path) -> None:
    file.write_text(line(1, loss=float("nan")))
    assert columns_module._parse_fast(file.read_bytes().replace(b": NaN", b": null")) is not None
    file.write_text(line(1, loss=float("nan")) + line(2, loss=float("inf")))
    assert str(Columns(file).read_all()["loss"].tolist()) == "[nan, inf]"


def test_a_torn_last_line_waits_for_its_end(file: Path) -> None:
    file.write_text(line(1) + line(2)[:20])
    columns = Columns(file).read_all()
    assert len(columns) == 1 and columns.skipped_lines == 0
    with file.open("a") as stream:
        stream.write(line(2)[20:])
    assert columns.read_all()["step"].tolist() == [1, 2]


def test_a_cut_replaced_or_removed_file(file: Path) -> None:
    file.write_text("".join(line(step) for step in range(1, 50)))
    columns = Columns(file).read_all()
    revision = columns.revision
    file.unlink()
    assert len(columns.read_all()) == 49, "what was read stays"
    file.write_text(line(1))
    assert len(columns.read_all()) == 1 and columns.revision > revision
    # longer, and another file.
    file.write_text("".join(line(step, loss=1.0) for step in range(1, 99)))
    assert len(columns.read_all()) == 98 and (columns["loss"] == 1).all()


def test_a_line_without_end_is_not_held_in_memory(file: Path) -> None:
    file.write_text(line(1) + "x" * 5000 + "\n" + line(2))
    columns = Columns(file)
    while columns.poll(1000) or columns.position < file.stat().st_size:
        pass
    assert columns["step"].tolist() == [1, 2] and columns.skipped_lines >= 1


def test_many_rows_take_the_fast_way(file: Path, monkeypatch) -> None:
    monkeypatch.delattr(columns_module, "parse_rows")
    rows = [f'{{"step": {i}, "attempt": 1, "loss": {i % 7}}}\n' for i in range(200_000)]
    file.write_text("".join(rows))
    assert len(Columns(file).read_all()) == 200_000


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.floats(-1e3, 1e3) | st.just(float("nan")), min_size=1, max_size=400),
    decay=st.sampled_from([0.0, 0.3, 0.9, 0.999]),
    cut=st.integers(0, 400),
)
def test_the_average_is_exact_however_it_was_fed(values, decay, cut) -> None:
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


def test_the_recurrence_over_many_blocks() -> None:
    values = np.random.default_rng(0).normal(size=70_001)
    expected, total = np.empty_like(values), 5.0
    for i, value in enumerate(values):
        total = 0.99 * total + value
        expected[i] = total
    np.testing.assert_allclose(discounted_sum(values, 0.99, 5.0), expected, atol=1e-9)


@pytest.mark.parametrize("view", [{}, {"log_x": True}, {"start": 40_000.0, "end": 40_100.0}])
def test_no_spike_is_lost_in_a_window_of_a_run_that_grows(tmp_path: Path, view: dict) -> None:
    losses = np.zeros(100_000)
    losses[[17, 40_050, 50_000, 99_999]] = 9, 8, -5, 7
    losses[60_000:61_000] = np.nan
    run = made(tmp_path / "run", [], Plan(global_batch_size=2))
    told = [line(step, loss=loss) for step, loss in enumerate(losses.tolist(), 1)]
    curves = Curves(run)
    for part in (told[:70_001], told[70_001:]):
        with (run.directory / "metrics.jsonl").open("a") as stream:
            stream.writelines(part)
        curves.read_all()
        asked = View(width=300, **view)
        x, (low, high, _) = curves.window(("loss",), asked)
    edges = pixel_edges(curves["step"], asked)
    assert len(x) <= 300 and (edges[-1] - edges[0] == 100_000 or "start" in view)
    parts = np.split(losses[: edges[-1]], edges[:-1])[1:]
    assert high.tolist() == pytest.approx([np.fmax.reduce(y) for y in parts], nan_ok=True)
    assert low.tolist() == pytest.approx([np.fmin.reduce(y) for y in parts], nan_ok=True)
    if "start" in view:
        assert x[0] < 40_000 and x[-1] > 40_100 and high.max() == 8


def test_curves_follow_a_new_attempt_and_a_clock_that_was_set_back(tmp_path: Path) -> None:
    rows = [row(i, tokens=1024, time=1e9 + i - 100 * (i > 20)) for i in range(1, 31)]
    one = Plan(global_batch_size=2)
    run = made(tmp_path / "run", rows, one.replace(data_parallel=2), one)
    file = run.directory / "metrics.jsonl"
    curves = Curves(run, smoothing=0.5).read_all()
    assert np.all(np.diff(curves["time"]) >= 0) and curves["time"][-1] == 19
    curves.window(("loss",), View(axis="step", width=100))
    with file.open("a") as stream:
        stream.write(line(11, attempt=2, loss=1.0))
    curves.read_all()
    x, values = curves.window(("loss", "mfu"), View(axis="tokens", width=100))
    assert len(x) == 11 and x[-1] == 11 * 1024
    assert values.shape == (6, 11) and values[0, -1] == 1.0
    mfu = 2048 * run.spec.flops_per_token() / 1e11
    assert values[4].tolist() == pytest.approx([mfu / 2] * 10 + [mfu])
    coarse, _ = curves.window(("loss",), View(axis="step", width=3))
    assert (coarse[0], coarse[-1], len(coarse)) == (1, 11, 3), "from the first step to the last"
    fresh = Average(0.5).update(curves["loss"])
    np.testing.assert_allclose(values[2], fresh)


def test_empty_columns_give_an_empty_window(tmp_path: Path) -> None:
    curves = Curves(made(tmp_path / "run", [], Plan(global_batch_size=2))).read_all()
    x, values = curves.window(("loss", "mfu"), View(axis="time", width=10, log_x=True))
    assert x.shape == (0,) and values.shape == (6, 0) and len(NAMES) == 22
