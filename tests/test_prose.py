"""Numbers in the sentences of notebooks equal numbers in the code or outputs of the notebook."""

import pytest

from tests.gallery import GALLERY, NOTEBOOKS
from tests.support.prose import evidence, markdown, prose, unseen

SAID = {
    "20": "seconds, about; see docs/benchmarks.md",
    "1.5": "of make validate",
    "22": "of make validate",
    "1.2": "of make validate",
    "2.28": "of AWS, see requirements/trainium.txt",
    "2.9": "of AWS, see requirements/trainium.txt",
    "2.33": "of AWS, see requirements/trainium.txt",
    "2006": "a year",
    "150": "the default of hung_after_s",
    "2026": "a year",
    "3.11": "the oldest Python that the kit supports, see pyproject.toml",
    "75": "the rule of the alert, kit.monitor.alerts",
    "15": "seconds, the rule of the alert, kit.monitor.alerts",
    "86": "size of the package, kit.evaluate.task_data",
    "19": "of 20: 95 %",
    "100": "an example",
    "14": "of the paper",
    "24": "of the paper",
    "256": "nodes of the paper",
    "400": "of the paper",
    "8,000": "remembered of the paper",
    "18": "fp32 gradients: 4 more than 14",
    "300": "of the figure's caption",
    "28.8": "the output of 01",
    "27.1": "the output of 01",
    "24.0": "the output of 01",
    "200": "of the paper",
    "1.8": "trillion tokens, of the paper",
}
"""Numbers in sentences that no output shows, with the source of each number."""

of_each = pytest.mark.parametrize(
    "notebook", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda notebook: notebook.stem
)


@of_each
def test_notebook_numbers_appear_in_code_or_outputs(notebook) -> None:
    missing = set(unseen(prose(notebook), evidence(notebook))) - set(SAID)
    assert missing == set(), "no output shows it; say where it is from"


@of_each
def test_gallery_page_has_the_notebooks_text(notebook) -> None:
    page = (GALLERY / f"{notebook.stem}.md").read_text(encoding="utf-8")
    assert [text for text in markdown(notebook) if text not in page] == [], "make gallery"


def test_number_without_output_is_found() -> None:
    assert unseen("1,024 devices, 38.4 %, 7 of 512", "x = 1024; 38.38 and 511") == ["512"]
