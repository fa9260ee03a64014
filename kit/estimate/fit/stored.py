"""Reads results that depend only on the packaged runs and site files: the fit of each machine, and
the sizes of each run. They are stored in a file, so that `kit plan` does not compute them anew.

`make fits` writes the file (`store.py`). The file contains a hash of its inputs. If an input has
changed, the results are computed anew, which takes seconds. This module does not import NumPy.
"""

import hashlib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

KIT = Path(__file__).parents[2]
FILE = Path(__file__).parent / "data" / "published_fits.json"
"""File with the stored results."""
INPUTS = (
    "kit/estimate/fit/data/published_runs.csv",
    "cluster/sites/*.toml",
    "kit/estimate/theory/*.py",
    "kit/estimate/fit/*.py",
    "kit/config/spec.py",
    "kit/config/plan.py",
)
"""Files on which the stored results depend: the runs, the machines, and the code of the equations
and of their fit."""
TEXTS = re.compile(rb'"""[\s\S]*?"""|#.*')
"""Matches docstrings and comments of Python code. Their changes do not change the results."""


@cache
def stored_results() -> dict[str, Any] | None:
    """Returns the content of the file, or None if the file is missing or one of its inputs has
    changed. `store.compute` describes the content.
    """
    try:
        results = json.loads(FILE.read_bytes())
    except (OSError, ValueError):
        return None
    return results if results["inputs"] == hash_inputs() else None


def hash_inputs() -> str:
    """Returns the SHA-256 of all input files. Docstrings and comments of code are left out."""
    digest = hashlib.sha256()
    for pattern in INPUTS:
        for file in sorted(KIT.parent.glob(pattern)):
            content = file.read_bytes()
            if file.suffix == ".py":
                content = b"\n".join(TEXTS.sub(b"", content).split())
            digest.update(file.name.encode() + b"\0" + content + b"\0")
    return digest.hexdigest()
