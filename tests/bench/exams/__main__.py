"""`python -m tests.bench.exams`: writes the planner's validation table to results/ and draws the
figure of the left-out machines.
"""

from rich.console import Console
from rich.markdown import Markdown

from tests.bench.exams.everything import everything
from tests.bench.exams.new_machine import never_met, never_met_figure
from tests.bench.results import load_average, write_results
from tests.bench.tables import table
from tests.gallery import GALLERY, in_both_themes

load = load_average()
results = write_results("validate", everything(), command="make validate", load_before=load)
Console().print(Markdown(table(results)))
picture = in_both_themes(never_met_figure(never_met()).to_svg())
(GALLERY / "never_met.svg").write_text(picture, encoding="utf-8")
