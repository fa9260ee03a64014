"""A separate JupyterLab server, and a notebook in a browser that is controlled as by a person."""

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

# Limit of every wait, in seconds, which ends a hang. The start of a server took over 60 s while 20
# processes ran.
PATIENCE_S = 180.0
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
# Windowing is off, because JupyterLab otherwise has no DOM elements for cells off screen.
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
    """Returns what is missing for a test in a browser and how to install it, or None."""
    for module in ("playwright", "jupyterlab"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed: pip install {module}"
    return None if chromium() else "there is no Chromium on this machine: apt-get install chromium"


def chromium() -> str | None:
    """Returns the path of this machine's Chromium or Chrome, or None."""
    found = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    return next(filter(None, found), None)


@contextlib.contextmanager
def headless() -> Iterator[Any]:
    """Starts this machine's Chromium without a window. Nothing is downloaded."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        options = {"executable_path": chromium(), "args": ["--no-sandbox", "--disable-gpu"]}
        with contextlib.closing(driver.chromium.launch(**options)) as started:
            yield started


class Lab:
    """A JupyterLab server that serves `folder`, run by the Python of an environment with separate
    settings.
    """

    def __init__(self, python: Path, home: Path, folder: Path, **environment: str) -> None:
        self.python, self.home, self.folder, self.log = python, home, folder, home / "server.log"
        self.environment = environment
        for extension, settings in SETTINGS.items():
            file = home / "settings" / "@jupyterlab" / f"{extension}.jupyterlab-settings"
            file.parent.mkdir(parents=True)
            file.write_text(json.dumps(settings))
        self.start()

    def start(self) -> None:
        """Starts the server and waits until it answers a request."""
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
        """Ends the server and its kernels, as pressing Ctrl-C twice would."""
        server, left = self.process, []
        if server.poll() is None:
            left = psutil.Process(server.pid).children(recursive=True)
        server.terminate()
        # The server waits for its kernels. A kernel that does not end is killed below.
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(15)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                # Only kernels are killed, not jobs that a kernel has started.
                if "ipykernel" in " ".join(process.cmdline()):
                    process.kill()
        server.kill()
        server.wait()

    def foreign_connections(self) -> list[str]:
        """Returns the addresses of other machines to which the server or a kernel is connected."""
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
    """A notebook in a separate browser page. Cell 0 opens the run, cell 1 displays its dashboard,
    and cell 2 runs until the test ends it.

    Attributes:
        received: Number of bytes that the page received through its web sockets.
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
        """Opens the notebook in a new browser window of `width` pixels, and waits for its
        kernel.
        """
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
        except Exception:  # JupyterLab itself sometimes hangs while it opens a notebook.
            self.page.reload()
            self.ready()

    def _watch(self, channel: Any) -> None:
        self.requests.append(channel.url)
        channel.on("framereceived", self._count)

    def _count(self, payload: str | bytes) -> None:
        self.received += len(payload)

    def reload(self) -> None:
        """Reloads the page, up to three times if JupyterLab does not find the dashboard's widget.
        ipywidgets' `get_model` waits 2 s for a widget model and does not retry on a slow page.
        """
        for _ in range(3):
            self.page.reload()
            self.ready()
            self.page.wait_for_selector(f"{VIEW}, {LOST}", state="attached")
            if self.page.locator(VIEW).count():
                return
        raise AssertionError(f"no view after three reloads: {self.text('body')[-1500:]}")

    def is_heard(self) -> bool:
        """Returns whether the kernel has answered all requests of the page."""
        return self.text(".kit-notice") == ""

    def ready(self) -> None:
        """Waits until the kernel is connected and idle. JupyterLab's tool bar shows this state too
        early.
        """
        self.evaluate(READY)

    def run_cell(self, number: int, *, wait: bool = True) -> None:
        """Runs a cell. Waits until the cell has ended unless `wait` is False."""
        self.evaluate(RUN_CELL, [number, wait])

    def output(self, number: int) -> str:
        """Returns the text output of a cell."""
        return self.evaluate(OUTPUT, number)

    def attach(self) -> None:
        """Runs the two cells that open the run and display the dashboard."""
        self.run_cell(0)
        self.run_cell(1)
        self.page.wait_for_selector(VIEW)

    def save(self) -> nbformat.NotebookNode:
        """Saves the notebook and returns the content of its file."""
        self.evaluate(SAVE)
        return nbformat.read(self.file, as_version=4)

    def evaluate(self, script: str, argument: object = None) -> Any:
        """Runs a script in the page. A time limit is added, because Playwright sets no limit for
        scripts.
        """
        race = f"""(a) => Promise.race([({script})(a),
            new Promise((_, no) => setTimeout(() => no(new Error('too long')), {1000 * PATIENCE_S}))])"""  # noqa: E501
        return self.page.evaluate(race, argument)

    def seen(self, name: str) -> str:
        """Returns an attribute of the dashboard's HTML element: state, step, attempt, points or
        draws.
        """
        return self.page.locator(".kit-monitor").last.get_attribute(f"data-{name}") or ""

    @property
    def step(self) -> int:
        return int(self.seen("step") or 0)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).last.inner_text()

    def click(self, name: str) -> None:
        self.page.get_by_role("button", name=name, exact=True).last.click()

    def until(self, condition: Callable[[], Any], limit_s: float = PATIENCE_S) -> float:
        """Waits until a condition is true, and returns the duration of the wait in seconds."""
        return wait_until(
            condition,
            lambda: self.page.locator("body").inner_text()[-1500:],
            limit_s,
            self.page.wait_for_timeout,
        )

    def photograph(self, name: str) -> None:
        photograph(self.page, name)


def photograph(page: Any, name: str, *, whole: bool = False) -> None:
    """Saves a screenshot of a page if KIT_SCREENSHOTS names a folder."""
    if folder := os.environ.get("KIT_SCREENSHOTS"):
        file = Path(folder) / f"{name}.png"
        page.screenshot(path=file, full_page=whole, animations="disabled")


def wait_until(condition, why, limit_s=PATIENCE_S, pause=lambda ms: time.sleep(ms / 1000)) -> float:
    """Waits until a condition is true, and returns the duration of the wait in seconds. After
    `limit_s` seconds, fails with the text that `why` returns.
    """
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < limit_s, why()
        pause(50)
    return time.monotonic() - start
