"""`import cluster` is cheap, because it runs on login nodes and at the start of every rank."""

import subprocess
import sys

CODE = """
import sys, time
start = time.process_time()
from cluster import local, submission
from cluster.job import Job
from cluster.site import Site
Site.load("frontier")
print(time.process_time() - start)
heavy = {"torch", "numpy", "kit", "tomli", "yaml"} & set(sys.modules)
assert not heavy, heavy
"""


def test_import_is_fast_and_loads_no_heavy_package():
    times = []
    for _ in range(3):
        run = subprocess.run(
            [sys.executable, "-c", CODE], capture_output=True, text=True, check=True
        )
        times.append(float(run.stdout))
    # The import takes 0.07 s on an idle machine. The import of a heavy package, such as torch,
    # takes a second or more.
    assert min(times) <= 0.3, times
