"""The claims of each paper on one page, as an artifact's reviewer would check them: expected, found
here, verdict.

The claims are in `data/claims.toml`. What is found is looked up in the rows of the kit's own
figures when the page is made; what is expected comes from the facts of the paper, unless the claim
is one in words.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from cluster.record import ConfigError, Record, field_doc
from kit.errors import kit_command
from kit.papers import FIGURES
from kit.papers.facts import Known, Relation, plain, read_toml
from kit.papers.layers import Rows, Runs
from kit.papers.recipes import PAPERS

Paper = Literal["frontier", "hlat"]
HEAD = """# Claims of {title}

What the paper claims, and what a fresh clone finds, made by `make gallery`.
**{predicted} of {total} claims are predicted:** the kit had said the paper's number without it, closely enough to be wrong.

{counts}

Found: the kit's model with its 90 % interval in brackets, or a run of this machine at demo scale where that is said;
no number in that column is typed. Tolerance: what counts as the paper's number, its last printed digit where nothing else is said.
Width: half the range of published numbers that would have passed, interval and tolerance together, as a share of what is found.

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
"""A prediction that would have passed a wider range of numbers, as a share, says little."""
HELD = {
    "arithmetic": "arithmetic as printed",
    "trend": "trend in the model",
    "demo": "trend at demo scale",
}
"""Verdicts on what holds and is no prediction, by the kind of the claim."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim(Record):
    """One claim of a paper, and where in the kit's figures the answer lies."""

    paper: Paper = field_doc("whose claim it is")
    claim: str = field_doc("in our words")
    kind: Literal["prediction", "arithmetic", "trend", "demo"] = field_doc(
        "a number that the model says without it, one that follows from others of the paper, a"
        " direction, or what a small run of this machine shows",
        default="prediction",
    )
    where: str = field_doc("section, table or figure of the paper")
    fact: tuple[str, ...] = field_doc("series and x in the facts of the paper", default=())
    known: Known = field_doc("how, where no fact says it", default="read")
    source: str = field_doc("that anyone can look up, where no fact says it", default="")
    figure: str = field_doc(
        "of the kit, whose rows have the answer; empty where it cannot be tried", default=""
    )
    at: dict[str, Any] = field_doc("cells of the row that has it", default_factory=dict)
    less: dict[str, Any] = field_doc("cells of a row to subtract", default_factory=dict)
    last: bool = field_doc("the last such row, not the first", default=False)
    column: str = field_doc("of the row", default="y")
    times: float = field_doc("factor from that column to the claim's unit", default=1.0)
    unit: str = field_doc("of what is expected and found", default="")
    within: tuple[float, ...] = field_doc(
        "both ends of what is expected, where it is not the fact's last digit", default=()
    )
    about: float = field_doc("share by which the fact's number may be off, if so", default=0.0)
    expected: str = field_doc("in words, where it is not the fact's number", default="")
    command: str = field_doc("that tries it, where it is not the figure's", default="")
    note: str = field_doc("why it is missed or cannot be tried", default="")


def claims(paper: Paper) -> list[Claim]:
    """Returns the claims of a paper, in the order of the page; one that is made of each of some
    rows (`each`) is as many claims.
    """
    found = []
    for table in read_toml("claims")["claim"]:
        own = {name: value for name, value in table.items() if name != "each"}
        for values in itertools.product(*table.get("each", {}).values()):
            case = dict(zip(table.get("each", {}), values, strict=True))
            cells = {"claim": table["claim"].format(**case), "at": table.get("at", {}) | case}
            found.append(Claim.from_dict(own | cells, "claims.toml"))
    return [claim for claim in found if claim.paper == paper]


def checked(claim: Claim, rows: Rows | None) -> Relation | None:
    """Returns what the rows of a claim's figure say beside what the paper says; without rows,
    nothing.

    Raises:
        ConfigError: there is no such row.
    """
    if rows is None:
        return None
    own = _row_with(claim, claim.at, rows)
    less = 0.0
    ends = {}
    if claim.less:
        less = _number_of(claim, _row_with(claim, claim.less, rows, own))
    elif claim.column in ("y", "value"):
        ends = {end: claim.times * float(own.get(end, math.nan)) for end in ("low", "high")}
    return Relation(
        claim=claim.claim,
        layer="measured" if claim.kind == "demo" else "modelled",
        value=_number_of(claim, own) - less,
        expected=claim.expected,
        within=claim.within or _tolerance(claim),
        **ends,
    )


def verdict(claim: Claim, found: Relation | None) -> str:
    """Returns what the page says of a claim: one of the verdicts in `claims.toml`."""
    if found is None:
        return "not tried"
    if found.verdict == "fails":
        return "not testable here" if claim.kind == "demo" else "missed"
    if claim.kind == "prediction":
        return "weak" if found.width > WEAK else "predicted"
    return HELD[claim.kind]


def drawn_rows(paper: Paper, runs: Runs = ()) -> dict[str, Rows | None]:
    """Returns the rows of each figure that the claims of a paper need; None where it shows a
    study not yet made.
    """
    rows: dict[str, Rows | None] = {}
    for figure in dict.fromkeys(claim.figure for claim in claims(paper)):
        try:
            rows[figure] = FIGURES[figure].draw(runs)[1] if figure else None
        except ConfigError:
            rows[figure] = None
    return rows


def page(paper: Paper, runs: Runs = ()) -> str:
    """Returns the page of a paper's claims in Markdown; `runs` are studies of this machine, for
    what they can tell.
    """
    drawn = drawn_rows(paper, runs)
    found = [(claim, checked(claim, drawn[claim.figure])) for claim in claims(paper)]
    said = [verdict(claim, relation) for claim, relation in found]
    meanings = read_toml("claims")["verdicts"]
    return HEAD.format(
        title=TITLES[paper],
        notebook=NOTEBOOKS[paper],
        model=PAPERS[paper].model_error(),
        predicted=said.count("predicted"),
        total=len(said),
        counts=_lines(
            {"verdict": word, "claims": str(said.count(word)), "it says": meaning}
            for word, meaning in meanings.items()
        ),
        lines=_lines(_row(claim, relation) for claim, relation in found),
    )


def _lines(rows: Iterable[Mapping[str, str]]) -> str:
    """Returns rows as a table of Markdown."""
    rows = [*rows]
    cells = [[*rows[0]], ["---"] * len(rows[0])]
    cells += [[text.strip().replace("|", "\\|") for text in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _row_with(
    claim: Claim, cells: Mapping[str, Any], rows: Rows, own: Any = None
) -> dict[str, Any]:
    """Returns the row that has these cells, and is not `own`; of several the first or last, or
    what `own` must beat.
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
    if own is not None and not claim.last:
        return max(found, key=lambda row: _number_of(claim, row))
    return found[-1 if claim.last else 0]


def _number_of(claim: Claim, row: Mapping[str, Any]) -> float:
    return claim.times * float(str(row[claim.column]).split(" ±")[0].replace(",", ""))


def _tolerance(claim: Claim) -> tuple[float, float]:
    """Returns the range of numbers that are about the fact's, or round to its last printed
    digit.
    """
    fact = PAPERS[claim.paper].FACTS.only(*claim.fact)
    digit = 0.5 * 10.0 ** -len(fact.value.partition(".")[2])
    off = claim.about * fact.number or digit
    return fact.number - off, fact.number + off


def _range(ends: Sequence[float]) -> str:
    """Returns a range in words, which may have one end only."""
    least, most = (f"{end:,.6g}" for end in ends)
    if math.isinf(ends[0]):
        return f"at most {most}"
    return f"at least {least}" if math.isinf(ends[1]) else f"{least} to {most}"


def _row(claim: Claim, found: Relation | None) -> dict[str, str]:
    """Returns the cells of a claim's line, by their column."""
    fact = PAPERS[claim.paper].FACTS.only(*claim.fact) if claim.fact else None
    told = "" if found is None else f"{plain(found.value)} {claim.unit}".strip()
    if found is not None and not math.isnan(found.low):
        told += f" ({plain(found.low)} to {plain(found.high)})"
    width = math.inf if found is None else found.width
    return {
        "claim": claim.claim,
        "where": claim.where,
        "how well known": fact.known if fact else claim.known,
        "expected": claim.expected or (f"{fact.number:,.6g} {claim.unit}" if fact else ""),
        "tolerance": _range(found.within) if found else "",
        "found": told,
        "width": f"± {width:.0%}" if claim.kind == "prediction" and width < math.inf else "",
        "verdict": f"**{verdict(claim, found)}**",
        "note": claim.note,
        "command": f"`{claim.command or kit_command('figure', claim.figure)}`",
        "source": fact.source if fact else claim.source,
    }
