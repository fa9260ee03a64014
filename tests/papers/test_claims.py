"""Claims of the papers: every claim is compared with a computed number, and the pages of the
gallery show the results.
"""

from typing import Any

import pytest

from kit.errors import ConfigError
from kit.papers import hlat_cost
from kit.papers.claims import TITLES, Claim, check_claim, claims, claims_page, drawn_rows, verdict
from kit.papers.facts import read_paper_toml
from kit.papers.recipes import PAPERS
from tests.gallery import GALLERY

OF_STUDIES = ("hlat-precision",)
"""Figures of studies that were trained on this machine. A fresh clone does not have the data of
these studies."""


def tables(text: str) -> list[list[dict[str, str]]]:
    """Returns the tables of a gallery page: the counts of verdicts, and the claims. Each row maps a
    column to the cell's text.
    """
    found = []
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if line.startswith("|")]
        if lines:
            head, _, *rows = ([cell.strip() for cell in line[1:-1].split(" | ")] for line in lines)
            found.append([dict(zip(head, row, strict=True)) for row in rows])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("paper", list(TITLES))
def test_claims_are_computed_as_in_gallery_page(paper) -> None:
    text, old_text = claims_page(paper), (GALLERY / f"claims_{paper}.md").read_text()
    (counted, made), (_, kept) = tables(text), tables(old_text)
    names = [claim.claim for claim in claims(paper)]
    assert [row["claim"] for row in made] == names == [row["claim"] for row in kept], "make gallery"
    said = [row["verdict"].strip("*") for row in made]
    assert all(int(row["claims"]) == said.count(row["verdict"]) for row in counted)
    assert sum(int(row["claims"]) for row in counted) == len(names), "each has a verdict"
    head = f"**{said.count('predicted')} of {len(names)} claims are predicted:**"
    assert head in text, "the headline counts nothing else"
    for claim, row, old in zip(claims(paper), made, kept, strict=True):
        untried = row["verdict"] == "**not tried**"
        assert untried == (claim.figure in ("", *OF_STUDIES)), claim.claim
        assert untried or row["tolerance"], "says what would have failed"
        assert claim.figure in OF_STUDIES or old["verdict"] == row["verdict"], "make gallery"
        assert claim.fact or claim.source, "says where it can be looked up"
        if row["verdict"] in ("**missed**", "**not tried**"):
            assert claim.note, "says why"


def test_remembered_facts_support_only_trends() -> None:
    for claim in (claim for paper in TITLES for claim in claims(paper)):
        fact = PAPERS[claim.paper].FACTS.only(*claim.fact) if claim.fact else claim
        assert fact.known != "remembered" or claim.kind == "trend", claim.claim


@pytest.mark.slow
def test_hlat_cost_claims_match_figure_verdicts() -> None:
    """Each of the 17 cost ratios in the figure must be a claim."""
    rows = drawn_rows("hlat")["hlat-cost"]
    sheet = [claim for claim in claims("hlat") if {"series", "x"} <= {*claim.at} and claim.about]
    found = {
        "{panel}, {series}, {x} nodes".format(**each.at): check_claim(each, rows) for each in sheet
    }
    own = {relation.claim: relation for relation in hlat_cost.relations()}
    assert len(own) == 17 == len(sheet) and own.keys() == found.keys()
    for name, relation in found.items():
        assert relation is not None and relation.verdict == own[name].verdict, name
        assert relation.within == pytest.approx(own[name].within)


def of_22b(**changes: Any) -> Claim:
    """Returns a claim on the published throughput of the 22B model, 38.38 % of peak. `changes`
    replaces fields of the claim.
    """
    asked = {"claim": "c", "where": "abstract", "fact": ("throughput_percent", "22B")}
    return Claim(paper="frontier", **asked, figure="f", at={"x": "22B"}, **changes)


@pytest.mark.parametrize(
    "kind, low, high, said",
    [
        ("prediction", 38.0, 39.0, "predicted"),
        ("prediction", 38.384, 50.0, "predicted"),
        ("prediction", 30.0, 47.0, "weak"),
        ("prediction", 38.39, 50.0, "missed"),
        ("arithmetic", 38.0, 39.0, "arithmetic as printed"),
        ("arithmetic", 39.0, 40.0, "missed"),
        ("trend", 30.0, 47.0, "trend in the model"),
        ("demo", 38.0, 39.0, "trend at demo scale"),
        ("demo", 39.0, 40.0, "not testable here"),
    ],
)
def test_verdict_follows_from_claim_kind_and_numbers(kind, low, high, said) -> None:
    claim = of_22b(kind=kind)
    found = check_claim(claim, [{"x": "22B", "y": 40.0, "low": low, "high": high}])
    assert verdict(claim, found) == said
    assert said in read_paper_toml("claims")["verdicts"]
    assert verdict(claim, check_claim(claim, None)) == "not tried"
    with pytest.raises(ConfigError, match="f has no row with"):
        check_claim(claim, [{"x": "1T", "y": 1.0}])


def test_number_outside_interval_is_within_tolerance_only() -> None:
    """A tolerance that the kit chose does not make a prediction of a number outside the interval.
    The rounding of the printed number does.
    """
    rows = [{"x": "22B", "y": 40.0, "low": 38.384, "high": 41.0}]
    chosen, rounded = of_22b(about=0.05), of_22b()
    assert verdict(chosen, check_claim(chosen, rows)) == "within tolerance only"
    assert verdict(rounded, check_claim(rounded, rows)) == "predicted"
    rows[0]["low"] = 38.0
    assert verdict(chosen, check_claim(chosen, rows)) == "predicted"


def test_assumed_or_fitted_claims_are_not_predictions() -> None:
    rows = [{"x": "22B", "y": 40.0, "low": 38.0, "high": 41.0}]
    missed = [{"x": "22B", "y": 40.0, "low": 39.0, "high": 41.0}]
    assumed, fitted = of_22b(assumes="the batch"), of_22b(fitted=True)
    assert verdict(assumed, check_claim(assumed, rows)) == "undecided"
    assert verdict(fitted, check_claim(fitted, rows)) == "fitted afterwards"
    assert verdict(fitted, check_claim(fitted, missed)) == "missed"
    assert verdict(assumed, check_claim(assumed, missed)) == "undecided", "another batch may agree"
    verdicts = read_paper_toml("claims")["verdicts"]
    assert {"within tolerance only", "undecided", "fitted afterwards", "trivial"} <= set(verdicts)
    strong = [claim for claim in claims("frontier") if claim.figure == "frontier-strong-scaling"]
    assert len(strong) == 2 and all(claim.assumes for claim in strong), "the batch is remembered"


def test_agreement_of_any_model_is_no_prediction() -> None:
    """Without any cost of scaling, a model gives 100 % weak scaling."""
    rows = [{"x": "22B", "y": 40.0, "low": 38.0, "high": 41.0}]
    claim = of_22b(trivial="any model gives it")
    assert verdict(claim, check_claim(claim, rows)) == "trivial"
    rows[0]["low"] = 39.0
    assert verdict(claim, check_claim(claim, rows)) == "missed"
    weak = [claim for claim in claims("frontier") if claim.figure == "frontier-weak-scaling"]
    assert len(weak) == 2 and all("gives 100 % too" in claim.trivial for claim in weak)


def test_claims_page_states_bias_of_cost_ratios() -> None:
    """All ratios of trn1 over p4d lie above the paper's number, which no single verdict shows."""
    page = (GALLERY / "claims_hlat.md").read_text()
    (bias,) = [line for line in page.splitlines() if line.startswith("Bias, trn1 over p4d")]
    _, rows = tables(page)
    ratios = [row["found"].split()[0] for row in rows if row["claim"].startswith("trn1 costs")]
    above = sum(float(ratio) > 0.6 for ratio in ratios)
    assert f"{above} of {len(ratios)} numbers found are above the paper's 0.6" in bias
    assert "26 claims" in page and "They check 11 statements" in page


def test_claim_width_covers_all_passing_values() -> None:
    found = check_claim(of_22b(about=0.1), [{"x": "22B", "y": 40.0, "low": 36.0, "high": 44.0}])
    assert found is not None and found.width == pytest.approx((4 + 3.838) / 40)


def test_claim_value_is_margin_over_best_other_row() -> None:
    asked = {"claim": "c", "where": "Table", "at": {"x": "a"}, "within": (0.1, 9.0)}
    best = Claim(paper="hlat", **asked, figure="f", less={"of": 1}, kind="arithmetic")
    rows = [{"x": x, "of": 1, "y": y} for x, y in (("a", "3.5 ± 0.2"), ("b", 1.0), ("c", 3.0))]
    found = check_claim(best, rows)
    assert found is not None and found.value == pytest.approx(0.5)
    assert verdict(best, found) == "arithmetic as printed"
