"""The sheets of claims: all of them are computed, and the pages in the gallery say what is
computed.
"""

import pytest

from kit.errors import ConfigError
from kit.papers.claims import TITLES, Claim, checked, claims, page, verdict
from tests.gallery import GALLERY

OF_STUDIES = ("hlat-precision",)
"""Figures of studies of this machine, which a fresh clone has not made."""


def lines(text: str) -> dict[str, list[str]]:
    """Returns the cells of a page's table by their claim."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {cells[0]: cells for cells in rows if "---" not in cells[0]}


@pytest.mark.slow
@pytest.mark.parametrize("paper", list(TITLES))
def test_every_claim_computes_and_the_page_of_the_gallery_says_so(paper) -> None:
    made, kept = lines(page(paper)), lines((GALLERY / f"claims_{paper}.md").read_text())
    assert list(made) == list(kept) == ["claim", *(claim.claim for claim in claims(paper))], (
        "make gallery"
    )
    for claim in claims(paper):
        said = made[claim.claim][5]
        assert (said == "**cannot be tried here**") == (claim.figure in ("", *OF_STUDIES)), (
            claim.claim
        )
        assert claim.figure in OF_STUDIES or kept[claim.claim][5] == said, (
            f"{claim.claim}: make gallery"
        )
        assert claim.fact or claim.source, "says where it can be looked up"
        assert claim.note or said == "**holds**", "says why it is missed or cannot be tried"


def test_a_claim_holds_where_the_interval_meets_the_last_digit_and_is_missed_elsewhere() -> None:
    asked = {"claim": "c", "where": "abstract", "fact": ("throughput_percent", "22B")}
    claim = Claim(paper="frontier", **asked, figure="f", at={"x": "22B"})
    for low, high, said in ((38, 39, "holds"), (38.384, 50, "holds"), (38.39, 50, "missed")):
        rows = [{"x": "22B", "y": 40.0, "low": low, "high": high}]
        assert verdict(checked(claim, rows)) == said
    assert verdict(checked(claim, None)) == "cannot be tried here"
    with pytest.raises(ConfigError, match="f has no row with"):
        checked(claim, [{"x": "1T", "y": 1.0}])


def test_a_claim_may_be_of_what_beats_all_others() -> None:
    asked = {"claim": "c", "where": "Table", "at": {"x": "a"}, "within": (0.1, 9.0)}
    best = Claim(paper="hlat", **asked, figure="f", less={"of": 1})
    rows = [{"x": x, "of": 1, "y": y} for x, y in (("a", "3.5 ± 0.2"), ("b", 1.0), ("c", 3.0))]
    found = checked(best, rows)
    assert found is not None and found.value == pytest.approx(0.5) and verdict(found) == "holds"
