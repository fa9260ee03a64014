"""Fits of the packaged runs that are stored in a file, and their use by `kit plan`."""

import json
import subprocess
import sys

import numpy as np
import pytest

from cluster.site import Site
from kit.estimate.fit import published, store, stored
from kit.estimate.fit.calibrate import Calibration, calibrate, published_calibration
from kit.estimate.theory.hardware import Hardware
from tests.support.sources import ROOT

FILE = json.loads(stored.FILE.read_text())


def test_stored_fits_have_the_hash_of_their_inputs() -> None:
    """If this test fails, run `make fits`."""
    assert FILE["inputs"] == stored.hash_inputs()


@pytest.mark.slow
def test_stored_fits_equal_new_fits() -> None:
    """If this test fails, run `make fits`. Other versions of NumPy round differently."""
    new = json.loads(json.dumps(store.compute()))
    assert (
        new["lines"] == FILE["lines"] and new["calibrations"].keys() == FILE["calibrations"].keys()
    )
    np.testing.assert_allclose(new["sizes"], FILE["sizes"])
    for name, values in new["calibrations"].items():
        old = FILE["calibrations"][name]
        assert values["measured"]["traits"] == old["measured"]["traits"]
        for key in ("covariance", "error", "misfit"):
            np.testing.assert_allclose(values[key], old[key], rtol=1e-3, atol=1e-6)
        for key, number in values["coefficients"].items():
            assert number == pytest.approx(old["coefficients"][key], rel=1e-4), (name, key)


def test_calibration_survives_json() -> None:
    site = Site.load("trn1.32xlarge")
    found = calibrate(published.of_site(site.name)[:5], site)
    hardware = Hardware.of(site)
    again = Calibration.from_dict(json.loads(json.dumps(found.to_dict())), hardware)
    assert again.to_dict() == found.to_dict() and again.hardware == hardware


def test_changed_input_is_computed_anew(monkeypatch) -> None:
    site = Site.load("tpu-v4")
    packaged = published_calibration(site)
    monkeypatch.setattr(stored, "hash_inputs", lambda: "of another file")
    stored.stored_results.cache_clear()
    try:
        assert stored.stored_results() is None
        again = published_calibration(site)
    finally:
        monkeypatch.undo()
        stored.stored_results.cache_clear()
    assert again.num_runs == packaged.num_runs > 0
    assert again.coefficients.factor == pytest.approx(packaged.coefficients.factor, rel=1e-6)


def test_comments_and_docstrings_leave_the_hash_unchanged() -> None:
    code = b'def f():\n    """Old text."""\n    return 1  # Old reason.\n'
    same = b'def f():\n    """New text,\n    two lines."""\n    return 1\n'
    other = b'def f():\n    """Old text."""\n    return 2  # Old reason.\n'

    def left(text: bytes) -> list[bytes]:
        return stored.TEXTS.sub(b"", text).split()

    assert left(code) == left(same) != left(other)


def test_planning_imports_neither_torch_nor_slow_packages() -> None:
    """The packages take longer to import than a whole search for a layout."""
    words = "plan llama3-8b --site dgx-h100 --devices 64 --batch 1024".split()
    code = (
        "import sys; from kit.__main__ import main\n"
        f"sys.argv = ['kit', *{words}]\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "kit.estimate.choose.report" in loaded, done.stderr
    slow = {"torch", "matplotlib", "scipy", "pandas", "numpy.ma", "kit.launcher", "kit.run"}
    assert not loaded & slow
