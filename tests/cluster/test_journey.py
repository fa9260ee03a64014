"""A run on a real Slurm that a user controls over ssh, from JupyterLab on a laptop without Slurm.

If KIT_SCREENSHOTS names a folder, a screenshot of each stage is saved there.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kit
from cluster.site import Site
from kit.run import Run
from tests.browser.conftest import browser  # noqa: F401
from tests.cluster.throttle import PLAN, SPEC, as_it_runs, slow_core
from tests.support.lab import Lab, Notebook
from tests.support.waiting import processes

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]
SITE = """\
name = "frontier"
description = "two nodes behind a login node"
scheduler = "slurm"
devices_per_node = 1
price_per_node_hour = {{ value = 2.0, source = "the tests" }}
login = "frontier"

[there]
python = "{python}"
folder = "{folder}"
sync = true

[device]
name = "one CPU core"
memory_bytes = {{ value = 4e9, source = "the tests" }}
memory_bytes_per_s = {{ value = 1e10, source = "the tests" }}

[device.peak_flops_per_s]
fp32 = {{ value = {peak:.4g}, source = "node check of a run" }}
bf16 = {{ value = {peak:.4g}, source = "node check of a run" }}

[device.matmul_flops_per_s]
fp32 = {{ value = {rate:.4g}, source = "fitted to a run" }}
bf16 = {{ value = {rate:.4g}, source = "fitted to a run" }}

[links]
inter_node_bytes_per_s = {{ value = 1e9, source = "the tests" }}

[slurm]
partition = "batch"
stop_before_end_s = 60
"""
CELLS = [
    """\
import kit, kit.monitor
from kit.monitor.goodput import ledger
from kit.monitor.runs import runs_table
from kit.notebook import Table

site = kit.Site.load("frontier.toml")
spec = kit.ModelSpec.llama(
    name="wide", num_layers=4, hidden_size=256, num_heads=4, ffn_hidden_size=1024,
    vocab_size=300, sequence_length=128)
data = {data!r}
plan = kit.Plan(data_parallel=2, zero_stage=1, micro_batch_size=2, global_batch_size=4)
recipe = kit.Recipe(data=data, num_steps=5000, learning_rate=1e-3, checkpoint_every=100)
run = kit.launch("runs/from-my-chair", spec=spec, plan=plan, recipe=recipe, site=site)
run.job""",
    "kit.monitor.Monitor(run)",
    "runs_table('runs')",
    """\
spent = ledger(run)
Table([{{"part": row["part"], "seconds": round(row["seconds"], 1), "USD": round(row["usd"], 4)}}
       for row in spent.rows() if row["seconds"] > 0.05],
      f"{{spent.goodput:.0%}} of the time of {{run.name}}'s devices counts")""",
]


HEAD_AND_MFU = """\
.kit-monitor > :not(.kit-head, .kit-progress, .kit-tiles, .kit-verdict, .kit-grid),
.kit-monitor .kit-grid > :not(:nth-child(2)) { display: none !important; }
.kit-monitor .kit-grid > :nth-child(2) { grid-column: 1 / -1; }"""


@pytest.fixture
def laptop_python(reader_python) -> Path:
    """Path of the Python on the user's laptop, made before `login_node` removes programs
    from PATH.
    """
    return reader_python()


@pytest.fixture
def rates(sandbox, site, tiny_dataset, tmp_path) -> dict[str, float]:
    """Returns {"peak": measured peak, "rate": rate with which the step time here is predicted},
    both for matrix products in FLOP/s.
    """
    recipe = kit.Recipe(data=str(tiny_dataset.directory), num_steps=30, learning_rate=1e-3)
    own = site.replace(devices_per_node=1)
    run = kit.launch(tmp_path / "first", spec=SPEC, plan=PLAN, recipe=recipe, site=own)
    assert run.job.wait(timeout_s=180).state == "done", run.job.logs()
    device = as_it_runs(run).device
    rates = {"peak": device.peak_flops_per_s, "rate": device.matmul_flops_per_s}
    return {name: facts["fp32"].value for name, facts in rates.items()}


@pytest.fixture
def notebook(
    browser,  # noqa: F811
    laptop_python,
    tiny_dataset,
    rates,
    login_node,
    tmp_path,
    monkeypatch,
) -> Iterator[Notebook]:
    """A notebook in a JupyterLab with the environment of the laptop. PATH has ssh, but no Slurm
    commands.
    """
    folder = tmp_path / "laptop"
    folder.mkdir()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    text = SITE.format(python=sys.executable, folder=tmp_path / "there", **rates)
    (folder / "frontier.toml").write_text(text)
    assert Site.load(str(folder / "frontier.toml")).there
    lab = Lab(laptop_python, tmp_path / "home-of-the-laptop", folder)
    cells = [cell.format(data=str(tiny_dataset.directory)) for cell in CELLS]
    found = Notebook(browser, lab, cells)
    yield found
    found.context and found.context.close()
    lab.stop()


def picture(notebook: Notebook, name: str) -> None:
    """Saves a screenshot of the dashboard's header and MFU chart. The option with this test's ssh
    config file is removed from the displayed ssh command.
    """
    if folder := os.environ.get("KIT_SCREENSHOTS"):
        shown = notebook.page.locator(".kit-monitor").last
        style = notebook.page.add_style_tag(content=HEAD_AND_MFU)
        notebook.page.wait_for_timeout(1000)  # The chart needs a moment to adapt to its new width.
        shown.locator(".kit-reason").evaluate(
            "e => { e.textContent = e.textContent.replace(/-F \\S+ /, ''); }"
        )
        shown.screenshot(path=Path(folder) / f"{name}.png", animations="disabled")
        style.evaluate("e => e.remove()")


def test_run_is_controlled_from_jupyterlab_over_ssh(notebook, login_node, tmp_path) -> None:
    """Tested: launch, live view, a slow rank, a lost connection, stop, resume, stop now and the
    cost ledger.
    """
    here, there = (tmp_path / side / "from-my-chair" for side in ("laptop/runs", "there"))
    notebook.open(width=1300)
    notebook.run_cell(0)
    notebook.run_cell(1)
    notebook.page.wait_for_selector(".kit-monitor[data-draws]")
    notebook.until(lambda: notebook.seen("state") == "running" and notebook.step > 30, 180)
    assert (here / "login.json").exists() and not (here / "checkpoints").exists()
    assert (there / "submit.sh").exists()
    notebook.until(lambda: notebook.text(".kit-verdict"), 120)
    notebook.photograph("journey-1-live")

    with slow_core("journey", processes(str(there), "RANK=1"), 0.2):
        notebook.until(lambda: "rank 1 on node2" in notebook.text(".kit-monitor"), 240)
        notebook.until(lambda: notebook.text(".kit-verdict").startswith("slower than expected"), 60)
        picture(notebook, "journey-2-slow")
        login_node.off()
        notebook.until(lambda: "no connection to frontier" in notebook.text(".kit-reason"), 120)
        assert " ago" in notebook.text(".kit-reason") and notebook.seen("state") == "running"
        step = notebook.step
        notebook.until(lambda: "not connected" in notebook.text(".kit-notice"), 60)
        assert notebook.text(".kit-badge") == "last seen running"
        picture(notebook, "journey-3-lost")
        login_node.on()
        notebook.until(lambda: notebook.step > step, 120)
        notebook.until(lambda: "no connection" not in notebook.text(".kit-reason"), 120)

    notebook.click("Stop after step")
    notebook.click("Really stop after step?")
    notebook.until(lambda: notebook.seen("state") == "done", 120)
    stopped = notebook.step
    picture(notebook, "journey-4-stopped")
    notebook.click("Resume")
    notebook.until(lambda: notebook.seen("attempt") == "2" and notebook.step > stopped + 20, 180)
    shares = notebook.page.locator(".kit-shares")
    notebook.until(lambda: shares.count() and "Goodput" in notebook.text(".kit-shares"), 60)
    picture(notebook, "journey-5-resumed")
    notebook.click("Stop now")
    notebook.click("Really stop now?")
    notebook.until(lambda: notebook.seen("state") in ("failed", "cancelled", "lost", "done"), 120)
    notebook.run_cell(2)
    notebook.run_cell(3)
    told = notebook.text(".jp-CodeCell:nth-of-type(4) .jp-OutputArea-output")
    notebook.page.locator(".jp-CodeCell").nth(3).scroll_into_view_if_needed()
    notebook.photograph("journey-6-ledger")
    assert "productive" in told and "start-up" in told, told
    rows = [json.loads(line) for line in (here / "metrics.jsonl").read_text().splitlines()]
    assert {row["attempt"] for row in rows} == {1, 2}
    assert Run.open(here).metrics()["step"].tolist()[-1] > stopped
