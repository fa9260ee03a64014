"""Speed of the planner's search for layouts, as rows of `make validate`."""

import time

from cluster.site import Site
from kit.config.spec import ModelSpec
from kit.estimate.choose.candidates import candidates
from kit.estimate.choose.search import search
from kit.show.results import Row, row

REPEATS = 5


def search_exam() -> list[Row]:
    """Returns rows with the number of layouts that one core evaluates per second, and with the
    seconds of the largest search.
    """
    spec, site = ModelSpec.preset("gpt-1t"), Site.load("frontier")
    found = search(spec, site, 3072, 9600)
    count = len(found.layouts)
    evaluation = _least(lambda: found.machine.evaluate(found.layouts))
    whole = _least(lambda: search(spec, site, 3072, 9600))
    listing = _least(lambda: candidates(spec, 3072, 9600))
    repeats = f"CPU time, best of {REPEATS} repeats"
    rate = {
        "at_least": 3e6,
        "note": f"{count:,} layouts of a 1T model on 3,072 devices; {repeats}",
    }
    seconds = {"at_most": 0.1, "note": f"{listing:.3f} s of it to list the layouts"}
    return [
        row(
            "Search: time and memory estimated on one core", count / evaluation, "layouts/s", **rate
        ),
        row("Search: all layouts of a 1T model on 3,072 devices", whole, "s", **seconds),
    ]


def _least(work) -> float:
    spent = []
    for _ in range(REPEATS):
        start = time.process_time()
        work()
        spent.append(time.process_time() - start)
    return min(spent)
