"""A real JupyterLab watches a real job. No action of the viewer stops the job, except a request to
stop it.

JupyterLab and its kernels use the installed wheel, not the source code of the checkout.
"""

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

import kit
from cluster.job import read_status
from cluster.state import JobState, read_state
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.run import Run
from tests.support.environments import ROOT
from tests.support.lab import KERNEL, Notebook, wait_until

pytestmark = pytest.mark.slow
CELL = """import pathlib, time
import kit, kit.monitor
run = kit.Run.open(%r)
print(kit.__file__)"""
MONITOR = "kit.monitor.Monitor(run, baselines={'published': 4.5})"
BUSY = """pathlib.Path('begun').touch()
while pathlib.Path('busy').exists():
    time.sleep(0.05)
pathlib.Path('ended').touch()"""
SUBSHELL = f"""async () => {{ const kernel = {KERNEL}, made = await kernel.requestCreateSubshell({{}}).done;
  kernel.subshellId = made.content.subshell_id; await kernel.requestCommInfo({{}}); kernel.subshellId = null;
  await kernel.requestDeleteSubshell({{subshell_id: made.content.subshell_id}}, true).done; }}"""  # noqa: E501
OURS = ("http://127.0.0.1:", "ws://127.0.0.1:", "blob:", "data:")


@pytest.fixture(scope="module")
def run(tiny_dataset, tmp_path_factory) -> Iterator[Run]:
    """Yields the run of a job that trains ten steps a second. The job sleeps for most of each
    step.
    """
    size = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "sequence_length": 64}
    spec = ModelSpec.gpt(name="small-gpt", vocab_size=300, **size)
    hook = tmp_path_factory.mktemp("hook") / "pace.py"
    hook.write_text("import time\n\n\ndef on_step(state):\n    time.sleep(0.09)\n    return {}\n")
    given = {"data": str(tiny_dataset.directory), "hook": str(hook), "num_steps": 1_000_000}
    recipe = Recipe(learning_rate=1e-3, warmup_steps=20, **given)
    plan = Plan(micro_batch_size=4, global_batch_size=4)
    run = kit.launch(tmp_path_factory.mktemp("lab") / "small", spec=spec, plan=plan, recipe=recipe)
    yield run
    run.job.cancel()
    run.job.wait(timeout_s=60)


@pytest.fixture(scope="module")
def opened(browser, lab, run) -> Iterator[Notebook]:
    """Yields a JupyterLab notebook with three cells. It records every network request of its
    pages.
    """
    notebook = Notebook(browser, lab, [CELL % str(run.directory), MONITOR, BUSY])
    yield notebook
    notebook.context and notebook.context.close()


@pytest.fixture
def notebook(opened, run) -> Notebook:
    """Returns a notebook with the live dashboard of a running job. The notebook of the last test is
    reused if possible.
    """
    if read_status(run.directory).state.is_final:
        kit.resume(run.directory)
    wait_until(
        lambda: run.metrics().summary()["step"] > 5, lambda: f"{run.job.status()}\n{run.job.logs()}"
    )
    if opened.context is None or not opened.page.locator(".kit-monitor").count():
        opened.open()
        opened.attach()
    opened.until(lambda: is_live(opened))
    return opened


def is_live(notebook: Notebook) -> bool:
    return notebook.seen("state") == "running" and notebook.is_heard()


def assert_heard(notebook: Notebook) -> None:
    # a page that waits for a reply of the kernel shows this within 3 s
    notebook.page.wait_for_timeout(3000)
    notebook.until(notebook.is_heard, 30)


def loss(notebook: Notebook) -> str:
    """Returns the accessible label (aria-label) of the loss chart."""
    return notebook.page.get_by_role("img", name="Loss").last.get_attribute("aria-label") or ""


def process(run: Run):
    state = read_state(run.directory)
    assert state is not None and state.process is not None
    return state.process


def test_dashboard_of_installed_wheel_draws_charts(notebook):
    package = notebook.text(".jp-CodeCell:nth-of-type(1) .jp-OutputArea-output")
    assert "site-packages" in package and str(ROOT) not in package
    assert not [each for each in notebook.save().cells[1].outputs if each.output_type == "stream"]
    assert "from step 1 " in loss(notebook)
    notebook.photograph("lab-installed")


def test_busy_cell_neither_stops_view_nor_loses_click(notebook, run):
    pictures = notebook.page.locator(".jp-OutputArea-output img").all()
    assert not any(picture.is_visible() for picture in pictures), "a live view needs no picture"
    busy, begun, ended = (notebook.lab.folder / name for name in ("busy", "begun", "ended"))
    busy.touch()
    notebook.run_cell(2, wait=False)
    # The cell creates a file when it starts to run. The kernel's status is no proof, because it
    # changes with every message.
    notebook.until(begun.exists)
    before = notebook.step
    notebook.click("Checkpoint now")
    notebook.until(lambda: notebook.step > before + 10)
    assert not ended.exists(), "busy all this time"
    notebook.photograph("lab")
    busy.unlink()
    notebook.until(ended.exists)
    notebook.until(lambda: "done" in notebook.text(".kit-history"))
    asked, done = notebook.text(".kit-history").split(", done ")
    assert asked.startswith("Checkpoint now: asked ") and "saved at step" in done
    assert f"saved at step {run.checkpoints.steps()[-1]:,}" in done, "the file is there"


def test_dashboard_continues_after_page_reload(notebook):
    notebook.save()
    before = notebook.step
    notebook.reload()
    notebook.until(lambda: notebook.step > before)
    assert notebook.seen("state") == "running"
    assert_heard(notebook)


def test_dashboard_works_after_a_subshell_is_closed(notebook):
    """After a reload of the page, JupyterLab restores views through a subshell of the kernel, which
    it then closes. ipykernel 7.4.0 then handles the page's next messages in the shell from which
    the kernel's last message seems to come.
    """
    notebook.evaluate(SUBSHELL)
    before = notebook.step
    notebook.until(lambda: notebook.step > before + 5)
    notebook.page.get_by_label("Smoothing").first.fill("0.5")
    assert_heard(notebook)


def test_kernel_restart_does_not_affect_the_job(notebook, run):
    job = process(run)
    notebook.evaluate(f"async () => await {KERNEL}.restart()")
    notebook.until(lambda: "restarted" in notebook.text(".kit-notice"))
    notebook.ready()
    notebook.attach()
    notebook.until(lambda: is_live(notebook))
    assert process(run) == job and job.is_alive
    newest = run.metrics().summary()["step"]
    notebook.until(lambda: notebook.step >= newest)
    assert "from step 1 " in loss(notebook), "the whole history is back"


def test_new_server_shows_saved_picture_then_live_run(notebook, run):
    job = process(run)
    saved = notebook.save()
    # The file has two drawings and a picture of at most 300 columns, for any length of run. A very
    # noisy run takes 290 kB.
    assert len(notebook.file.read_bytes()) < 400_000 and "widgets" not in saved.metadata
    notebook.lab.stop()
    assert job.is_alive and read_status(run.directory).state is JobState.RUNNING
    notebook.lab.start()
    notebook.open()
    notebook.page.wait_for_selector(".jp-OutputArea-output img")
    assert "Run this cell to see the live dashboard" in notebook.text("body")
    assert "model not found" not in notebook.text("body")
    notebook.attach()
    newest = run.metrics().summary()["step"]
    notebook.until(lambda: notebook.step >= newest and notebook.seen("state") == "running")
    assert process(run) == job


def test_killed_job_is_shown_as_lost_and_resumed(notebook, run):
    """The dashboard shows the job's state "lost" within five seconds."""
    notebook.click("Checkpoint now")
    notebook.until(lambda: "saved at step" in notebook.text(".kit-history"))
    saved = run.checkpoints.steps()[-1]
    notebook.until(lambda: notebook.step > saved + 10)
    attempt = read_status(run.directory).attempt
    os.kill(process(run).pid, signal.SIGKILL)
    assert notebook.until(lambda: notebook.seen("state") == "lost") < 5
    assert "killed" in notebook.text(".kit-reason") and "job lost" in notebook.text(".kit-alerts")
    lost_at = run.metrics().summary()["step"]
    notebook.photograph("lab-lost")

    notebook.click("Resume")
    notebook.until(lambda: f"attempt {attempt + 1} started" in notebook.text(".kit-history"))
    notebook.until(
        lambda: notebook.seen("attempt") == str(attempt + 1) and notebook.seen("state") == "running"
    )
    notebook.until(lambda: notebook.step > lost_at)
    assert f"attempt {attempt + 1} from step {saved + 1:,}" in loss(notebook)
    metrics = run.metrics()
    assert np.all(np.diff(metrics["step"]) == 1), "each step once"
    assert metrics["attempt"][metrics["step"] == saved + 1].tolist() == [attempt + 1], "the newer"


def test_stop_after_step_saves_checkpoint_and_picture(notebook, run):
    """The picture in the saved notebook shows the run's final state."""
    before = run.checkpoints.steps()
    notebook.click("Stop after step")
    notebook.click("Really stop after step?")
    notebook.until(lambda: notebook.seen("state") == "done")
    notebook.until(lambda: "done" in notebook.text(".kit-history"))
    assert "Stop after step: asked " in notebook.text(".kit-history")
    assert "stopped on request" in notebook.text(".kit-reason")
    assert before != run.checkpoints.steps()
    assert run.checkpoints.steps()[-1] == run.metrics().summary()["step"]
    picture = notebook.page.locator(".jp-OutputArea-output img").last

    def told() -> bool:  # the file does not exist while it is replaced
        return picture.count() > 0 and "stopped" in (picture.get_attribute("alt") or "")

    notebook.until(told, 180)
    outputs = notebook.save().cells[1].outputs
    assert "image/png" in outputs[-1].data and len(notebook.file.read_bytes()) < 400_000


def test_notebook_connects_to_no_other_machine(opened):
    if opened.context is None:
        opened.open()
    assert not opened.lab.foreign_connections()
    assert any(url.startswith("ws:") for url in opened.requests) and len(opened.requests) > 50
    assert not [url for url in opened.requests if not url.startswith(OURS)]
