"""A person's way through JupyterLab: watch, click while a cell is busy, reload, restart the kernel, lose the job."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest

from cluster.state import JobState, asked_at
from kit.run import Run
from tests.monitor.recorded import add_rows, dead_process, recorded_run, say

pytestmark = pytest.mark.slow
READY = """async () => { while (!window.jupyterapp) await new Promise(r => setTimeout(r, 50));
  const app = window.jupyterapp; await app.restored;
  let w; for (let i = 0; i < 600; i++) { w = app.shell.currentWidget; if (w?.sessionContext) break;
    await new Promise(r => setTimeout(r, 50)); }
  await w.context.ready; await w.sessionContext.ready; await w.revealed;
  for (let i = 0; i < 1200; i++) { const k = w.sessionContext.session?.kernel;
    if (k?.connectionStatus === 'connected' && k.status === 'idle') return k.id;
    await new Promise(r => setTimeout(r, 25)); }
  throw new Error('the kernel is not ready'); }"""
RUN_ALL = "async () => await window.jupyterapp.commands.execute('notebook:run-all-cells')"
RUN_CELL = """async (i) => { const app = window.jupyterapp; app.shell.currentWidget.content.activeCellIndex = i;
  app.commands.execute('notebook:run-cell'); }"""
OURS = ("http://127.0.0.1:", "ws://127.0.0.1:", "blob:", "data:")
SAVE = "async () => await window.jupyterapp.shell.currentWidget.context.save()"


class Trainer(threading.Thread):
    """Writes a step every 100 ms, as a job that is not ours would."""

    def __init__(self, run: Run) -> None:
        super().__init__(daemon=True)
        self.run_, self.step, self.done = run, 200, threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.1):
            self.step += 1
            add_rows(self.run_, self.step, self.step)
            say(self.run_, JobState.RUNNING, step=self.step)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    """A live run with 200 steps of history."""
    thread = Trainer(recorded_run(tmp_path / "lab" / "run", steps=200, planned=100_000))
    thread.start()
    yield thread
    thread.done.set()
    thread.join()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[tuple[Callable, Callable]]:
    """Returns how to start a JupyterLab server with settings of its own, and how to stop it."""
    home, servers = tmp_path / "home", []
    for extension, settings in {
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
        "notebook-extension/tracker": {"windowingMode": "none"},
    }.items():
        file = home / "settings" / "@jupyterlab" / f"{extension}.jupyterlab-settings"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(settings))
    places = {"HOME": "", "JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime",
              "JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "spaces", "IPYTHONDIR": "ipython",
              "MPLCONFIGDIR": "mpl"}  # fmt: skip
    environment = os.environ | {name: str(home / place) for name, place in places.items()}

    def start() -> str:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}",
                   "--LabApp.expose_app_in_browser=True", "--IdentityProvider.token=", "--ServerApp.password=",
                   f"--ServerApp.root_dir={tmp_path / 'lab'}"]  # fmt: skip
        with (tmp_path / "server.log").open("a") as output:
            server = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        servers.append(server)
        for _ in range(300):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/api/status", timeout=2):
                return f"http://127.0.0.1:{port}"
            time.sleep(0.2)
        pytest.fail(f"JupyterLab did not start:\n{(tmp_path / 'server.log').read_text()[-2000:]}")

    def stop() -> None:
        servers[-1].terminate()
        try:
            servers[-1].wait(15)
        except subprocess.TimeoutExpired:  # it waits for a kernel that does not end
            servers[-1].kill()
            servers[-1].wait()

    yield start, stop
    if servers and servers[-1].poll() is None:
        stop()


def evaluate(page, script: str, argument: object = None, limit_s: float = 60):
    """Runs a script in the page, which by itself would wait for ever."""
    race = f"""(a) => Promise.race([({script})(a),
        new Promise((_, no) => setTimeout(() => no(new Error('too long')), {1000 * limit_s}))])"""
    return page.evaluate(race, argument)


def test_a_run_is_watched_through_everything_that_happens_to_its_viewer(browser, lab, trainer, tmp_path) -> None:  # noqa: PLR0915
    cells = ["from kit.run import Run\nfrom kit.monitor.widget import Monitor\n"
             f"run = Run.open({str(trainer.run_.directory)!r})",
             "Monitor(run, baselines={'published': 2.2})", "import time; time.sleep(8)"]  # fmt: skip
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(book, tmp_path / "lab" / "watch.ipynb")
    context = browser.new_context(viewport={"width": 1300, "height": 1150})
    page, foreign = context.new_page(), []
    page.on("request", lambda r: foreign.append(r.url) if not r.url.startswith(OURS) else None)

    def look() -> tuple[str, int]:
        root = page.locator(".kit-monitor").first
        return root.get_attribute("data-state"), int(root.get_attribute("data-step") or 0)

    def until(condition: Callable[[], bool], limit_s: float = 15) -> float:
        start = time.monotonic()
        while not condition():
            assert time.monotonic() - start < limit_s, page.locator("body").inner_text()[-1500:]
            page.wait_for_timeout(50)
        return time.monotonic() - start

    def attach() -> None:
        evaluate(page, READY)
        for cell in (0, 1):
            evaluate(page, RUN_CELL, cell)
        page.wait_for_selector(".kit-monitor[data-draws]", timeout=30_000)

    start_lab, stop_lab = lab
    address = start_lab()
    page.goto(f"{address}/lab/tree/watch.ipynb?reset", timeout=60_000)
    attach()
    until(lambda: look()[0] == "running" and look()[1] > 200)

    assert not page.locator(".jp-OutputArea-output img").is_visible(), "a live view needs no picture"

    evaluate(page, RUN_CELL, 2)  # a busy kernel
    page.wait_for_timeout(1500)
    before = look()[1]
    page.get_by_role("button", name="Checkpoint now").click()
    until(lambda: look()[1] > before + 10, limit_s=6)
    until(lambda: asked_at(trainer.run_.directory, "checkpoint") is not None, limit_s=20)
    if folder := os.environ.get("KIT_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / "lab.png", animations="disabled")

    evaluate(page, SAVE)
    saved = (tmp_path / "lab" / "watch.ipynb").read_text()
    assert "image/png" in saved and len(saved) < 200_000 and "widgets" not in json.loads(saved)["metadata"]

    page.reload()
    evaluate(page, READY)
    page.wait_for_selector(".kit-monitor[data-draws]", timeout=30_000)  # no cell was run again
    before = look()[1]
    until(lambda: look()[1] > before)

    evaluate(page, "async () => await window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    page.wait_for_timeout(1000)
    attach()
    until(lambda: look()[1] >= trainer.step - 30)

    stop_lab()
    before = trainer.step
    address = start_lab()
    page.goto(f"{address}/lab/tree/watch.ipynb?reset", timeout=60_000)
    evaluate(page, READY)
    page.wait_for_selector(".jp-OutputArea-output img", timeout=10_000)  # the saved picture
    attach()
    until(lambda: look()[1] >= trainer.step - 20)  # JupyterLab has started, and the view is live

    trainer.done.set()
    trainer.join()
    say(trainer.run_, JobState.RUNNING, step=trainer.step, process=dead_process())
    assert until(lambda: look()[0] == "lost") < 5
    page.wait_for_timeout(2500)
    evaluate(page, SAVE)
    outputs = nbformat.read(tmp_path / "lab" / "watch.ipynb", as_version=4).cells[1].outputs
    assert "image/png" in outputs[1].data and outputs[1].data["image/png"] not in saved, "the picture of the end"
    assert not foreign, f"something left the machine: {foreign}"
    context.close()
