"""Questions in tokens, days and money, several sites side by side, and published recipes."""

import json

import pytest
from typer.testing import CliRunner

from cluster.record import ConfigError
from kit.cli.app import app
from kit.config.spec import ModelSpec
from kit.estimate.choose.budget import UNKNOWN_PRICE, Budget
from kit.estimate.choose.report import compare_sites, plan_report
from kit.papers.recipes import names, plan_arguments, published_recipe

SIZES = {"site": "dgx-h100", "devices": 64, "batch": 1024, "count": 1}
DAY = 86_400


def test_tokens_days_and_money_determine_each_other() -> None:
    """10,000 tokens/s for 2 USD an hour: calculation by hand."""
    tokens = 14 * DAY * 10_000
    wanted = {"tokens": tokens, "days": 14, "price_usd": 14 * 24 * 2}
    for budget in (Budget(days=14), Budget(tokens=tokens), Budget(usd=14 * 24 * 2)):
        assert budget.use(10_000, 2.0) == pytest.approx(wanted)
    assert Budget(days=14).use(10_000, None)["price_usd"] is None
    with pytest.raises(ConfigError, match="--budget 672: price unknown"):
        Budget(usd=672).use(10_000, None)


def test_budget_text_has_the_interval_of_the_step_time() -> None:
    """A step of 10 s, 90 % interval 8 to 12.5 s, and a million tokens: calculation by hand."""
    step = {"step_time_s": 10.0, "step_time_low_s": 8.0, "step_time_high_s": 12.5}

    def text(budget: Budget, usd_per_hour: float | None) -> str:
        return budget.text(step | budget.use(1e5, usd_per_hour), num_params=10**9)

    assert text(Budget(tokens=7.2e9), 20.0) == (
        "20.0 hours (90 % interval 16.0 to 25.0), 400 USD (90 % interval 320 to 500)"
    )
    tokens = "4.32e+10 tokens (90 % interval 3.46e+10 to 5.4e+10; 43 a parameter)"
    assert text(Budget(days=5), 2.0) == f"{tokens}, 240 USD"
    assert text(Budget(usd=240), 2.0) == f"{tokens}, 5.0 days"
    assert text(Budget(tokens=4.32e10), None) == (
        f"5.0 days (90 % interval 4.0 to 6.2), {UNKNOWN_PRICE}"
    )


@pytest.mark.parametrize(
    "numbers", [{}, {"days": 1, "usd": 1}, {"days": 0}, {"tokens": float("nan")}]
)
def test_wrong_budget_is_refused(numbers: dict) -> None:
    with pytest.raises(ConfigError, match="Give"):
        Budget(**numbers)


def test_plan_answers_days_budget_and_nodes() -> None:
    days = plan_report("llama3-8b", **SIZES, days=14, price=2.0).chosen
    row = days.row
    assert row["tokens"] == pytest.approx(14 * DAY * row["tokens_per_s"])
    assert row["price_usd"] == pytest.approx(14 * 24 * 64 * 2)
    assert row["tokens_per_usd"] == pytest.approx(row["tokens"] / row["price_usd"])
    text = dict(days.facts())["14 days"]
    assert "a parameter" in text and text.endswith(", 43,008 USD")
    by_node = {"site": "dgx-h100", "nodes": 8, "batch": 1024, "count": 1}
    budget = plan_report("llama3-8b", **by_node, budget=43_008, price=2.0).chosen
    assert budget.row["days"] == pytest.approx(14) and budget.search.num_devices == 64
    unknown = plan_report("llama3-8b", **SIZES, days=14).chosen
    assert dict(unknown.facts())["14 days"].endswith(UNKNOWN_PRICE)


def test_sites_are_compared_in_order_of_first_number() -> None:
    machines = [
        {"site": "hgx-b200", "devices": 32, "price": 4.5},
        {"site": "dgx-h100", "devices": 256},
    ]
    found = compare_sites(machines, model="llama3-8b", batch=1024, count=1, tokens=1e12)
    days = [float(cells[found.header.index("days")]) for cells in found.rows]
    assert found.header[2] == "days" and days == sorted(days)
    assert [cells[0] for cells in found.rows] == ["dgx-h100", "hgx-b200 (not calibrated)"]
    assert f"dgx-h100: {UNKNOWN_PRICE}" in found.notes
    alone = plan_report("llama3-8b", site="dgx-h100", devices=256, batch=1024, tokens=1e12)
    assert found.sorted_reports[0].chosen.row == alone.chosen.row


def test_order_of_sites_is_uncertain_if_intervals_overlap() -> None:
    """The interval of a site without measured runs is wide, so such a site may come first although
    it is slower. With few devices it is certainly slower.
    """
    for devices, is_uncertain in ((128, True), (16, False)):
        machines = [{"site": "hgx-b200", "devices": devices}, {"site": "dgx-h100", "devices": 256}]
        for number in ({"tokens": 1e12}, {"days": 2.0}, {}):
            found = compare_sites(machines, model="llama3-8b", batch=1024, count=1, **number)
            (first, second) = (report.chosen.row for report in found.sorted_reports)
            overlap = first["step_time_high_s"] > second["step_time_low_s"]
            assert overlap == is_uncertain
            said = [text for text in found.notes if "the order of" in text]
            assert bool(said) == is_uncertain, number
            assert not said or said[0].endswith("is uncertain, since their 90 % intervals overlap")


def test_comparison_command_takes_a_value_per_site() -> None:
    words = "plan llama3-8b --site dgx-h100 --devices 256 --site hgx-b200 --devices 128"
    words += " --price 2 --price 4 --batch 1024 --days 1 --json"
    done = CliRunner().invoke(app, words.split())
    found = json.loads(done.stdout)["sites"]
    devices = {each["site"]: each["num_devices"] for each in found}
    assert devices == {"dgx-h100": 256, "hgx-b200": 128}
    wrong = CliRunner().invoke(app, [*words.split(), "--price", "3"])
    assert "3 values for 2 sites" in str(wrong.exception)


@pytest.mark.parametrize("name", names())
def test_recipe_is_planned_as_published(name: str) -> None:
    recipe = published_recipe(name)
    chosen = plan_report(**plan_arguments(name), count=1).chosen.plan
    assert chosen.replace(compile=False, precision=recipe.plan.precision) == recipe.plan.replace(
        compile=False
    )


def test_recipe_command_scales_replicas() -> None:
    """The 1T run of the paper had 6 replicas of 512 GCDs."""
    done = CliRunner().invoke(app, ["plan", "frontier-1t", "--devices", "3072", "--json"])
    plan = json.loads(done.stdout)["plan"]
    assert (plan["tensor_parallel"], plan["pipeline_parallel"], plan["data_parallel"]) == (8, 64, 6)
    wrong = CliRunner().invoke(app, ["plan", "frontier-1t", "--devices", "1000"])
    assert "a replica of frontier-1t has 512 devices" in str(wrong.exception)


@pytest.mark.slow
def test_context_parallelism_is_tried_on_long_sequences() -> None:
    long = {"site": "dgx-h100", "devices": 64, "batch": 64, "count": 1}
    answer = plan_report("llama3-8b", **long, sequence_length=131_072).chosen
    assert answer.plan.context_parallel == 1
    assert answer.explain().other_engines[0].startswith("context parallelism (")
    spec = ModelSpec.preset("llama3-8b")
    assert spec.sequence_length < 16_384
    # Without context parallelism a micro-batch of a million tokens does not fit.
    longer = plan_report("llama3-8b", **long, sequence_length=1_048_576).chosen
    assert longer.plan.context_parallel > 1
    assert any("does not train it" in text for text in longer.explain().warnings)
