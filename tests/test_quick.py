"""`make quick` skips slow tests, and tests that start processes or browsers. A test is skipped even
if its code catches the exception that refuses the process.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SAMPLE = """
import subprocess, sys, threading
import pytest
from tests.support.workers import run_ranks

def start():
    subprocess.run([sys.executable, "-c", ""])

def test_computes():
    subprocess.run(["true"])

def test_starts_a_python():
    start()

def test_holds_the_refusal_back():
    try:
        start()
    except BaseException:
        pass

def test_starts_one_in_a_thread():
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()

def test_starts_three_ranks():
    run_ranks(3, print)

def test_draws_in_a_browser(browser):
    pass

@pytest.mark.slow
def test_is_slow():
    pass
"""


def test_quick_leaves_out_slow_and_process_tests(tmp_path: Path) -> None:
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    command = [sys.executable, "-m", "pytest", "-q", "--quick", "-p", "tests.conftest"]
    done = subprocess.run(
        [*command, "-c", str(ROOT / "pyproject.toml"), str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "1 passed, 4 skipped, 2 deselected" in done.stdout, done.stdout
