"""Evaluation reports: their tables, and the merge of two reports, which must not lose the scores of
other tasks.
"""

import pytest

from kit.errors import ConfigError
from kit.evaluate.hlat import TABLES, compare
from kit.evaluate.report import EvalReport, ItemSource, Metric, TaskScore, wilson
from tests.evaluate.conftest import task_score


def score(task="piqa", *, value=0.5, items=1838, shots=0, cut=0) -> TaskScore:
    place = "baber/piqa/default/validation"
    return task_score(
        task,
        metrics=(Metric.of("acc", value, 0.01, items), Metric.of("likelihood", -1.0, None, items)),
        num_items=items,
        total_items=1838,
        seed=None if items == 1838 else 7,
        num_truncated=cut,
        num_fewshot=shots,
        chance=0.5,
        harness_version="0.4.13",
        data=(ItemSource(origin="mirror", path=place, sha256="ab" * 32),),
        seconds=1.25,
    )


def report(*scores: TaskScore) -> EvalReport:
    return EvalReport(
        name="<demo>", step=100, tokens_seen=51200, tokenizer_sha256="cd" * 32, scores=scores
    )


def test_report_escapes_text_and_marks_partial_scores():
    whole, partial = report(score()), report(score(items=200))
    assert partial["piqa"].partial and partial["piqa"].coverage == "partial: 200 of 1,838 items"
    for text in (partial.to_text(), partial._repr_html_()):
        assert text.count("partial: 200 of 1,838 items") == 2
    assert not whole["piqa"].partial and whole["piqa"].coverage == "1,838 items"
    assert "partial" not in str(whole) and str(whole) == whole.to_text()
    assert score(cut=12).coverage == "1,838 items; 12 prompts cut"
    start = "<demo>, step 100, 51,200 training tokens\ntask  metric"
    assert whole.to_text().startswith(start) and "(no scores)" in report().to_text()
    page = report(score().replace(note="isolated"))._repr_html_()
    assert "&lt;demo&gt;, step 100" in page
    assert "var(--jp-ui-font-color2" in page and "color:#" not in page, "the colour of the page"
    with pytest.raises(KeyError, match="no task 'boolq'; it has piqa"):
        whole["boolq"]
    with pytest.raises(KeyError, match="piqa has no metric 'f1'; it has acc, likelihood"):
        score().metric("f1")


def test_report_rows_have_interval_chance_shots_and_data():
    accuracy, likelihood = report(score(value=0.625, shots=5)).rows()
    assert accuracy == {
        "task": "piqa",
        "metric": "acc",
        "value": "0.6250",
        "95 % interval": "0.6026 to 0.6469",
        "chance": "0.500",
        "coverage": "1,838 items",
        "shots": "5",
        "version": "task 1.0, lm-eval 0.4.13",
        "data": "mirror:baber/piqa/default/validation abababab",
        "seconds": "1.2",
    }
    assert likelihood["value"] == "-1.0000"
    assert likelihood["95 % interval"] == likelihood["chance"] == ""


def test_interval_of_none_or_all_right_has_a_width():
    none, all_right = (Metric.of("acc,none", value, 0.0, 5) for value in (0.0, 1.0))
    assert none.text(4) == "0.0000 (0.0000 to 0.4345)"
    assert all_right.text(4) == "1.0000 (0.5655 to 1.0000)"
    assert none.stderr == 0.0, "the harness's own is kept beside it"
    no_share = Metric.of("likelihood_diff,none", 2.0, 0.5, 5)
    assert no_share.interval(2) == "1.02 to 2.98", "1.96 standard errors"
    assert Metric.of("bits_per_byte", 2.0, None, 5).interval() == ""


@pytest.mark.parametrize("num_items", [1, 5, 164])
def test_wilson_interval_equals_its_definition(num_items):
    """The Wilson interval contains every share for which the observed share is within 1.96 standard
    errors. A search over 20,001 shares finds the same limits.
    """
    for right in range(num_items + 1):
        share = right / num_items
        true = [k / 20_000 for k in range(20_001)]
        inside = [p for p in true if (share - p) ** 2 <= 1.96**2 * p * (1 - p) / num_items + 1e-12]
        low, high = wilson(share, num_items)
        assert abs(low - inside[0]) < 1e-4 and abs(high - inside[-1]) < 1e-4


def test_report_tables_fit_80_columns(monkeypatch):
    found = report(score(), score("arc_easy").replace(note="how code was kept apart, " * 5))
    assert max(map(len, found.to_text().splitlines())) > 100, "a pipe gets one line a row"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    for each in (found, *TABLES.values(), compare(report())):
        text = each.to_text()
        assert max(map(len, text.splitlines())) <= 80 and "\x1b" not in text
    assert "data mirror:" in found.to_text() and "measured here" in compare(report()).to_text()


def test_merge_keeps_other_tasks_and_complete_scores(tmp_path):
    file = tmp_path / "new" / "eval" / "step_00000100.json"
    for value, items, kept in ((0.1, 100, 0.1), (0.2, 200, 0.2), (0.3, 1838, 0.3), (0.4, 200, 0.3)):
        report(score(value=value, items=items)).write_merged(file)
        assert EvalReport.read(file)["piqa"].metric("acc").value == kept
    report(score(value=0.5), score("arc_easy")).write_merged(file)
    report(score(value=0.6), score(shots=5), score("heldout")).write_merged(file)
    merged = EvalReport.read(file)
    found = [(score.task, score.num_fewshot) for score in merged.scores]
    assert found == [("piqa", 0), ("arc_easy", 0), ("piqa", 5), ("heldout", 0)]
    assert merged["piqa"].metric("acc").value == 0.6
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(
    ("value", "stderr", "low", "high"),
    [
        (25.0, 1.2, 22.755, 27.466),  # 25 x exp(-1.96 x 0.048), 25 x exp(1.96 x 0.048)
        (45_000.0, 30_000.0, 12_182.4, 166_222.8),
    ],
)
@pytest.mark.parametrize("name", ["perplexity", "word_perplexity", "perplexity,flexible"])
def test_perplexity_interval_is_positive(name, value, stderr, low, high):
    metric = Metric.of(name, value, stderr, 300)
    assert (metric.low, metric.high) == (
        pytest.approx(low, rel=1e-4),
        pytest.approx(high, rel=1e-4),
    )


def test_perplexity_without_a_usable_error_has_no_interval():
    """The example is lambada with an untrained model: the standard error of the bootstrap is 2e13
    times the value.
    """
    metric = Metric.of("perplexity", 2.65e14, 6.4e27, 30)
    assert (metric.low, metric.high) == (None, None)


def test_bits_per_byte_interval_is_not_negative():
    metric = Metric.of("answer_bits_per_byte", 0.02, 0.05, 4)
    assert metric.low == 0 and metric.high == pytest.approx(0.118)


def test_score_without_metrics_is_refused():
    with pytest.raises(ConfigError, match="metrics are missing"):
        task_score("piqa", metrics=())
