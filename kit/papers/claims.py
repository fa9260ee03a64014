"""Makes a page with the claims of each paper, as a reviewer of an artifact would check them. Each
claim has a number that is expected, a number that the kit finds, and a verdict.

The claims are in `data/claims.toml`. The number found is read from the data of the kit's own
figures while the page is made. The number expected comes from the published numbers of the paper. A
claim without a number has an expected result in words.
"""

import contextlib
import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from cluster.record import ConfigError, Record, field_doc
from kit.errors import kit_command
from kit.papers import FIGURES
from kit.papers.facts import Known, Relation, plain_number, read_paper_toml
from kit.papers.layers import Rows, Runs
from kit.papers.recipes import PAPERS

Paper = Literal["frontier", "hlat"]
HEAD = """# Claims of {title}

What the paper claims, and what a fresh clone finds, made by `make gallery`.
**{predicted} of {total} claims are predicted:** the kit had said the paper's number without it, closely enough to be wrong.
{statements}

{counts}

Found: the kit's model with its 90 % interval in brackets, or a run of this machine at demo scale where that is said;
no number in that column is typed. Tolerance: what counts as the paper's number, its last printed digit where nothing else is said.
Width: half the range of published numbers that would have passed, interval and tolerance together, as a share of what is found.
{bias}

How well known: *read* in the paper or in its authors' code and logs; *quoted* in somebody's account of it; *derived*
from numbers that were read; *remembered*, so only a trend is checked.
[All figures](./) of the gallery, [the notebook](../{notebook}.ipynb).

The model: {model}.

{lines}
"""  # noqa: E501
TITLES: dict[Paper, str] = {
    "frontier": "Optimizing Distributed Training on Frontier for LLMs (arXiv 2312.12705)",
    "hlat": "HLAT: High-quality LLM Pre-trained on AWS Trainium (arXiv 2404.10630)",
}
NOTEBOOKS = {"frontier": "06_frontier_figures", "hlat": "07_hlat_figures"}
WEAK = 0.2
"""Largest relative width at which a confirmed prediction counts as strong evidence. The width is
half the range of published numbers that would have passed the check, divided by the predicted
number. A prediction with a larger width gets the verdict `weak`."""
VERDICTS = {
    "prediction": "predicted",
    "arithmetic": "arithmetic as printed",
    "trend": "trend in the model",
    "demo": "trend at demo scale",
}
"""Maps the kind of a claim to the verdict that the page prints if the claim holds."""
FEWEST_FOR_BIAS = 3
"""Smallest number of predictions of one published number for which the page states their bias."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim(Record):
    """One claim of a paper, with the place of the number that checks it: a figure of the kit, and a
    row and column of the figure's data.
    """

    paper: Paper = field_doc("short name of the paper that makes the claim")
    claim: str = field_doc(
        "statement of the paper in one sentence, in the kit's words and not as a quotation"
    )
    kind: Literal["prediction", "arithmetic", "trend", "demo"] = field_doc(
        "kind of the claim. prediction: a number that the planner's model predicts without"
        " knowing the paper's number. arithmetic: a number that follows from other numbers of"
        " the paper. trend: whether a number rises or falls. demo: a result of a small run on"
        " this machine.",
        default="prediction",
    )
    where: str = field_doc("section, table or figure of the paper with the claim")
    fact: tuple[str, ...] = field_doc(
        "(series, x) by which the claimed number is found in the CSV file of published numbers;"
        " default: the file does not have the claimed number",
        default=(),
    )
    known: Known = field_doc(
        "reliability of a claim without `fact`: read, quoted, derived or remembered", default="read"
    )
    source: str = field_doc(
        "source of a claim without `fact`, named so that anyone can look it up", default=""
    )
    figure: str = field_doc(
        "name of the kit's figure whose data contain the number that checks the claim; empty:"
        " the claim cannot be checked",
        default="",
    )
    at: dict[str, Any] = field_doc(
        "columns and values that select the row of the figure's data with the number that"
        " checks the claim",
        default_factory=dict,
    )
    less: dict[str, Any] = field_doc(
        "columns and values that select a row whose number is subtracted from the"
        " number of the row that `at` selects; default: nothing is subtracted",
        default_factory=dict,
    )
    last: bool = field_doc(
        "whether the last row that matches `at` is used instead of the first", default=False
    )
    column: str = field_doc("name of the column with the number that checks the claim", default="y")
    times: float = field_doc(
        "factor that converts the number in `column` to the unit of the claim", default=1.0
    )
    unit: str = field_doc("unit of both the expected number and the number found", default="")
    within: tuple[float, ...] = field_doc(
        "(lower end, upper end) of the range that counts as expected; default: the claimed"
        " number with the tolerance `about`",
        default=(),
    )
    about: float = field_doc(
        "tolerance of the claimed number, as a fraction of it; default: half a unit of its"
        " last printed digit",
        default=0.0,
    )
    expected: str = field_doc("expected result in words; default: the claimed number", default="")
    assumes: str = field_doc(
        "what the check assumes about the paper although it is only remembered, and although"
        " another value would change the result; default: the check needs no such assumption",
        default="",
    )
    trivial: str = field_doc(
        "which simple model gives the claimed number too, so that meeting it says little; default:"
        " no simple model is known to give it",
        default="",
    )
    fitted: bool = field_doc(
        "whether the kit's formula was changed until it agreed with the claimed number, after"
        " this number was known",
        default=False,
    )
    command: str = field_doc(
        "command that checks the claim; default: the command that draws the figure", default=""
    )
    note: str = field_doc(
        "reason why the claim is missed or cannot be checked, or another remark", default=""
    )


def claims(paper: Paper) -> list[Claim]:
    """Returns the claims of a paper, in the order in which the page of claims lists them.

    An entry of `claims.toml` with the key `each` describes a claim about several rows of a figure.
    It becomes one claim for each combination of the values in `each`.
    """
    found = []
    for table in read_paper_toml("claims")["claim"]:
        each = table.get("each", {})
        fields = {name: value for name, value in table.items() if name != "each"}
        for values in itertools.product(*each.values()):
            cells = dict(zip(each, values, strict=True))
            case = {
                "claim": table["claim"].format(**cells),
                "at": table.get("at", {}) | cells,
            }
            claim = Claim.from_dict(fields | case, "claims.toml")
            if claim.paper == paper:
                found.append(claim)
    return found


def check_claim(claim: Claim, rows: Rows | None) -> Relation | None:
    """Returns the number found for a claim, with the range in which it must lie. The number is read
    from `rows`, the data of the claim's figure.

    Returns None if `rows` is None, since the claim then cannot be checked.

    Raises:
        ConfigError: No row of the figure's data matches the claim.
    """
    if rows is None:
        return None
    own = _row_with(claim, claim.at, rows)
    layer = "measured" if claim.kind == "demo" else "modelled"
    value = _number_of(claim, own)
    low = math.nan
    high = math.nan
    if claim.less:
        value -= _number_of(claim, _row_with(claim, claim.less, rows, own))
    elif claim.column in ("y", "value"):
        low = claim.times * float(own.get("low", math.nan))
        high = claim.times * float(own.get("high", math.nan))
    return Relation(
        claim=claim.claim,
        layer=layer,
        value=value,
        low=low,
        high=high,
        expected=claim.expected,
        within=claim.within or _tolerance(claim),
    )


def verdict(claim: Claim, found: Relation | None) -> str:
    """Returns the verdict on a claim, such as `predicted`, `weak` or `missed`. The table `verdicts`
    in `claims.toml` explains each verdict.

    `found` is the number found for the claim, with the range in which it must lie. It is None if
    the claim could not be checked.
    """
    if found is None:
        return "not tried"
    if claim.kind == "prediction" and claim.assumes:
        return "undecided"
    if found.verdict == "fails" and claim.kind == "demo":
        return "not testable here"
    if found.verdict == "fails":
        return "missed"
    if claim.fitted:
        return "fitted afterwards"
    if claim.kind == "prediction":
        if claim.about and not found.low <= _claimed_number(claim) <= found.high:
            return "within tolerance only"
        if found.width > WEAK:
            return "weak"
        if claim.trivial:
            return "trivial"
    return VERDICTS[claim.kind]


def drawn_rows(paper: Paper, runs: Runs = ()) -> dict[str, Rows | None]:
    """Returns the data of all figures that the claims of a paper need, as a dict from figure name
    to rows.

    The value is None if the figure shows stored runs of this machine that have not been made yet.
    The key "" stands for claims without a figure, and its value is None too.
    """
    rows: dict[str, Rows | None] = {}
    for figure in dict.fromkeys(claim.figure for claim in claims(paper)):
        rows[figure] = None
        if figure:
            with contextlib.suppress(ConfigError):
                _, rows[figure] = FIGURES[figure].draw(runs)
    return rows


def claims_page(paper: Paper, runs: Runs = ()) -> str:
    """Returns the page of a paper's claims in Markdown.

    `runs` are folders with small training runs of this machine. Their measurements check the claims
    that a small run can check.
    """
    drawn = drawn_rows(paper, runs)
    lines = []
    num_claims: Counter[str] = Counter()
    values: dict[tuple[str, ...], list[float]] = {}
    for claim in claims(paper):
        relation = check_claim(claim, drawn[claim.figure])
        lines.append(_cells(claim, relation))
        num_claims[verdict(claim, relation)] += 1
        found = values.setdefault(claim.fact or (claim.claim,), [])
        if relation is not None and claim.kind == "prediction":
            found.append(relation.value)
    statements = ""
    if len(values) < len(lines):
        statements = (
            f"They check {len(values)} statements of the paper: a statement about several numbers"
            " of nodes is one claim for each."
        )
    counts = [
        {"verdict": name, "claims": str(num_claims[name]), "it says": meaning}
        for name, meaning in read_paper_toml("claims")["verdicts"].items()
    ]
    page = HEAD.format(
        title=TITLES[paper],
        notebook=NOTEBOOKS[paper],
        model=PAPERS[paper].model_error(),
        predicted=num_claims["predicted"],
        total=len(lines),
        statements=statements,
        bias=_bias_lines(paper, values),
        counts=_markdown_table(counts),
        lines=_markdown_table(lines),
    )
    # A paper without repeated statements or bias has empty lines in their place.
    return re.sub(r"\n{3,}", "\n\n", page)


def _bias_lines(paper: Paper, values: Mapping[tuple[str, ...], Sequence[float]]) -> str:
    """Returns a line with the bias of all predictions of one published number, for each number with
    at least FEWEST_FOR_BIAS predictions. `values` maps the number's `fact` to the predicted values.

    Wide intervals can contain a number although all predictions lie on one side of it. The column
    of verdicts does not show this.
    """
    lines = []
    for fact, found in values.items():
        if len(found) >= FEWEST_FOR_BIAS:
            number = PAPERS[paper].FACTS.only(*fact).number
            above = sum(value > number for value in found)
            mean = sum(found) / len(found) / number - 1
            lines.append(
                f"Bias, {fact[1]}: {above} of {len(found)} numbers found are above the paper's"
                f" {number:g}; their mean error is {mean:+.0%}."
            )
    return "\n".join(lines)


def _markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Returns a Markdown table of rows, which must have equal keys."""
    cells = [[*rows[0]], ["---"] * len(rows[0])]
    cells += [[text.strip().replace("|", "\\|") for text in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _row_with(
    claim: Claim, cells: Mapping[str, Any], rows: Rows, own: Any = None
) -> dict[str, Any]:
    """Returns the row of a figure's data whose cells have the values in `cells`. If several rows
    match, the first is returned, or the last if `claim.last` is true.

    If a claim says that the number of one row is larger than the numbers of other rows, `own` is
    the one row. Then `own` is skipped. The other matching row with the largest number is returned,
    so that the caller can compare both numbers.
    """
    found = [
        row
        for row in rows
        if row is not own and all(row.get(name) == value for name, value in cells.items())
    ]
    if not found:
        raise ConfigError(
            f"claims.toml: {claim.claim!r}: {claim.figure} has no row with {dict(cells)}."
        )
    if claim.last:
        return found[-1]
    if own is not None:
        return max(found, key=lambda row: _number_of(claim, row))
    return found[0]


def _number_of(claim: Claim, row: Mapping[str, Any]) -> float:
    """Returns the number in the claim's column of a row, converted to the unit of the claim. In a
    cell such as `41.2 ± 0.3`, the text from ` ±` on is ignored.
    """
    text, _, _ = str(row[claim.column]).partition(" ±")
    return claim.times * float(text.replace(",", ""))


def _claimed_number(claim: Claim) -> float:
    """Returns the published number of a claim with `fact`."""
    return PAPERS[claim.paper].FACTS.only(*claim.fact).number


def _tolerance(claim: Claim) -> tuple[float, float]:
    """Returns (least, most), the range of numbers that count as equal to the claimed number.

    The range extends by the fraction `claim.about` to both sides. If `claim.about` is 0, it
    contains the numbers that round to the printed digits of the claimed number.
    """
    fact = PAPERS[claim.paper].FACTS.only(*claim.fact)
    margin = claim.about * fact.number
    if not margin:
        _, _, decimals = fact.value.partition(".")
        margin = 0.5 * 10.0 ** -len(decimals)
    return fact.number - margin, fact.number + margin


def _range(ends: Sequence[float]) -> str:
    """Returns a range of numbers in words, such as `at most 1`. `ends` are (least, most), and one
    of them may be infinite.
    """
    least, most = (f"{end:,.6g}" for end in ends)
    if math.isinf(ends[0]):
        return f"at most {most}"
    if math.isinf(ends[1]):
        return f"at least {least}"
    return f"{least} to {most}"


def _cells(claim: Claim, found: Relation | None) -> dict[str, str]:
    """Returns the row of a claim in the table of the page that `claims_page` writes, as a dict from
    column name to cell. `found` is the result of the check of the claim, or None if it was not
    checked.
    """
    known = claim.known
    expected = claim.expected
    source = claim.source
    if claim.fact:
        fact = PAPERS[claim.paper].FACTS.only(*claim.fact)
        known = fact.known
        source = fact.source
        expected = expected or f"{fact.number:,.6g} {claim.unit}"
    tolerance = ""
    number = ""
    width = ""
    if found is not None:
        tolerance = _range(found.within)
        number = f"{plain_number(found.value)} {claim.unit}".strip()
        if not math.isnan(found.low):
            number += f" ({plain_number(found.low)} to {plain_number(found.high)})"
        if claim.kind == "prediction" and math.isfinite(found.width):
            width = f"± {found.width:.0%}"
    return {
        "claim": claim.claim,
        "where": claim.where,
        "how well known": known,
        "expected": expected,
        "tolerance": tolerance,
        "found": number,
        "width": width,
        "verdict": f"**{verdict(claim, found)}**",
        "note": "; ".join(text for text in (claim.assumes, claim.trivial, claim.note) if text),
        "command": f"`{claim.command or kit_command('figure', claim.figure)}`",
        "source": source,
    }
