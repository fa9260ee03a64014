"""A JupyterLab server of one's own, and a notebook in it as a person handles it."""

import contextlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import psutil

from tests.support.environments import outside

PATIENCE_S = 180.0  # of every wait: it ends a hang; a server took over 60 s beside 20 processes
READY = """async () => { while (!window.jupyterapp) await new Promise(r => setTimeout(r, 50));
  const app = window.jupyterapp; await app.restored;
  let w; while (!(w = app.shell.currentWidget)?.sessionContext) await new Promise(r => setTimeout(r, 50));
  await w.context.ready; await w.sessionContext.ready; await w.revealed;
  let k; while (!((k = w.sessionContext.session?.kernel)?.connectionStatus === 'connected' && k.status === 'idle'))
    await new Promise(r => setTimeout(r, 25)); }"""  # noqa: E501
RUN_CELL = """async ([i, wait]) => { const app = window.jupyterapp, notebook = app.shell.currentWidget.content;
  notebook.activeCellIndex = i; notebook.deselectAll();
  const done = app.commands.execute('notebook:run-cell'); if (wait) await done; }"""  # noqa: E501
KERNEL = "window.jupyterapp.shell.currentWidget.sessionContext.session.kernel"
OUTPUT = """(i) => window.jupyterapp.shell.currentWidget.content.widgets[i].model.outputs.toJSON()
  .map(o => Array.isArray(o.text) ? o.text.join('') : (o.text || o.evalue || '')).join('')"""
SAVE = "async () => await window.jupyterapp.shell.currentWidget.context.save()"
VIEW, LOST = ".kit-monitor[data-draws]", ".jp-OutputArea-output:has-text('not found')"
# Cells off screen have no DOM otherwise.
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "none"},
}
JUPYTERLAB = (
    "-m jupyterlab --no-browser --allow-root --LabApp.expose_app_in_browser=True"
    " --IdentityProvider.token= --ServerApp.password="
)
PLACES = {
    "HOME": "",
    "JUPYTER_CONFIG_DIR": "config",
    "JUPYTER_DATA_DIR": "data",
    "JUPYTER_RUNTIME_DIR": "runtime",
    "JUPYTERLAB_SETTINGS_DIR": "settings",
    "JUPYTERLAB_WORKSPACES_DIR": "spaces",
    "IPYTHONDIR": "ipython",
    "MPLCONFIGDIR": "mpl",
}


def why_not() -> str | None:
    """Returns what is missing for a measurement in a browser, and how to get it."""
    for module in ("playwright", "jupyterlab"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed: pip install {module}"
    return None if chromium() else "there is no Chromium on this machine: apt-get install chromium"


def chromium() -> str | None:
    """Returns the path of this machine's Chromium or Chrome."""
    found = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    return next(filter(None, found), None)


@contextlib.contextmanager
def headless() -> Iterator[Any]:
    """A headless Chromium of this machine; nothing is downloaded."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        options = {"executable_path": chromium(), "args": ["--no-sandbox", "--disable-gpu"]}
        with contextlib.closing(driver.chromium.launch(**options)) as started:
            yield started


class Lab:
    """A JupyterLab server of an environment, with settings of its own, that serves `folder`."""

    def __init__(self, python: Path, home: Path, folder: Path, **environment: str) -> None:
        self.python, self.home, self.folder, self.log = python, home, folder, home / "server.log"
        self.environment = environment
        for extension, settings in SETTINGS.items():
            file = home / "settings" / "@jupyterlab" / f"{extension}.jupyterlab-settings"
            file.parent.mkdir(parents=True)
            file.write_text(json.dumps(settings))
        self.start()

    def start(self) -> None:
        """Starts the server and waits for its first answer."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        own = [f"--port={port}", f"--ServerApp.root_dir={self.folder}"]
        command = [str(self.python), *JUPYTERLAB.split(), *own]
        places = {name: str(self.home / place) for name, place in PLACES.items()}
        environment = outside(**places, **self.environment)
        with self.log.open("a") as output:
            self.process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        wait_until(self._answers, self._last_words)

    def stop(self) -> None:
        """Ends the server and its kernels, as Ctrl-C twice would."""
        server, left = self.process, []
        if server.poll() is None:
            left = psutil.Process(server.pid).children(recursive=True)
        server.terminate()
        # It waits for a kernel that does not end.
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(15)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                # And not a job that a kernel has started.
                if "ipykernel" in " ".join(process.cmdline()):
                    process.kill()
        server.kill()
        server.wait()

    def foreign_connections(self) -> list[str]:
        """Returns addresses outside this machine to which server and kernels are connected."""
        server = psutil.Process(self.process.pid)
        peers = [
            connection.raddr.ip
            for process in (server, *server.children(recursive=True))
            for connection in process.net_connections("inet")
            if connection.raddr
        ]
        assert peers, "kernel and server talk to each other"
        return [peer for peer in peers if not peer.startswith(("127.", "::1", "::ffff:127."))]

    def _answers(self) -> bool:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"{self.address}/api/status", timeout=2),
        ):
            return True
        return False

    def _last_words(self) -> str:
        return f"JupyterLab did not start:\n{self.log.read_text()[-2000:]}"


class Notebook:
    """A notebook in a page of its own: cell 0 opens the run, cell 1 shows its dashboard, cell 2
    is busy until told.

    Attributes:
        received: bytes that came through its web sockets.
    """

    def __init__(self, browser: Any, lab: Lab, cells: list[str], name: str = "watch.ipynb") -> None:
        self.browser, self.lab, self.file = browser, lab, lab.folder / name
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        book.metadata["kernelspec"] = kernel
        nbformat.write(book, self.file)
        self.requests: list[str] = []
        self.received = 0
        self.context = None

    def open(self, width: int = 1300) -> None:
        """Opens the notebook in a fresh browser window of some pixels, and waits for its kernel."""
        if self.context:
            self.context.close()
        self.context = self.browser.new_context(viewport={"width": width, "height": 1250})
        self.page = self.context.new_page()
        self.page.set_default_timeout(1000 * PATIENCE_S)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("websocket", self._watch)
        self.page.goto(f"{self.lab.address}/lab/tree/{self.file.name}?reset")
        try:
            self.ready()
        except Exception:  # JupyterLab itself hangs now and then while it opens
            self.page.reload()
            self.ready()

    def _watch(self, channel: Any) -> None:
        self.requests.append(channel.url)
        channel.on("framereceived", self._count)

    def _count(self, payload: str | bytes) -> None:
        self.received += len(payload)

    def reload(self) -> None:
        """Reloads the page, again where JupyterLab has lost the view: ipywidgets' `get_model` looks
        for a model for 2 s, and a page that is held up just then does not look once more.
        """
        for _ in range(3):
            self.page.reload()
            self.ready()
            self.page.wait_for_selector(f"{VIEW}, {LOST}", state="attached")
            if self.page.locator(VIEW).count():
                return
        raise AssertionError(f"no view after three reloads: {self.text('body')[-1500:]}")

    def is_heard(self) -> bool:
        """Whether the kernel has answered all that the page has asked."""
        return self.text(".kit-notice") == ""

    def ready(self) -> None:
        """Waits until the kernel is connected and idle; the tool bar says so too early."""
        self.evaluate(READY)

    def run_cell(self, number: int, *, wait: bool = True) -> None:
        """Runs a cell, to its end unless told otherwise."""
        self.evaluate(RUN_CELL, [number, wait])

    def output(self, number: int) -> str:
        """Returns what a cell has printed."""
        return self.evaluate(OUTPUT, number)

    def attach(self) -> None:
        """Runs the two cells that show the dashboard."""
        self.run_cell(0)
        self.run_cell(1)
        self.page.wait_for_selector(VIEW)

    def save(self) -> nbformat.NotebookNode:
        """Saves the notebook and returns what is in its file."""
        self.evaluate(SAVE)
        return nbformat.read(self.file, as_version=4)

    def evaluate(self, script: str, argument: object = None) -> Any:
        """Runs a script in the page, which by itself would wait for ever."""
        race = f"""(a) => Promise.race([({script})(a),
            new Promise((_, no) => setTimeout(() => no(new Error('too long')), {1000 * PATIENCE_S}))])"""  # noqa: E501
        return self.page.evaluate(race, argument)

    def seen(self, name: str) -> str:
        """Returns what the dashboard says of itself: state, step, attempt, points, draws."""
        return self.page.locator(".kit-monitor").last.get_attribute(f"data-{name}") or ""

    @property
    def step(self) -> int:
        return int(self.seen("step") or 0)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).last.inner_text()

    def click(self, name: str) -> None:
        self.page.get_by_role("button", name=name, exact=True).last.click()

    def until(self, condition: Callable[[], Any], limit_s: float = PATIENCE_S) -> float:
        """Waits for a condition, and returns how long that took in seconds."""
        return wait_until(
            condition,
            lambda: self.page.locator("body").inner_text()[-1500:],
            limit_s,
            self.page.wait_for_timeout,
        )

    def photograph(self, name: str) -> None:
        photograph(self.page, name)


def photograph(page: Any, name: str, *, whole: bool = False) -> None:
    """Keeps a picture for people to look at, where KIT_SCREENSHOTS names a folder."""
    if folder := os.environ.get("KIT_SCREENSHOTS"):
        file = Path(folder) / f"{name}.png"
        page.screenshot(path=file, full_page=whole, animations="disabled")


def wait_until(condition, why, limit_s=PATIENCE_S, pause=lambda ms: time.sleep(ms / 1000)) -> float:
    """Waits for a condition, returns the seconds that took, and fails with `why` when too late."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < limit_s, why()
        pause(50)
    return time.monotonic() - start
