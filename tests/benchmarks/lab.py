"""A JupyterLab server and pages in headless Chromium, used as a person does: for measurements
from end to end.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PATIENCE_S = 90.0
READY = """async () => { while (!window.jupyterapp) await new Promise(r => setTimeout(r, 50));
  const app = window.jupyterapp; await app.restored;
  let w; while (!(w = app.shell.currentWidget)?.sessionContext) await new Promise(r => setTimeout(r, 50));
  await w.context.ready; await w.sessionContext.ready; await w.revealed;
  let k; while (!((k = w.sessionContext.session?.kernel)?.connectionStatus === 'connected' && k.status === 'idle'))
    await new Promise(r => setTimeout(r, 25)); }"""  # noqa: E501
"""The tool bar says "idle" before there is a kernel, and what is run then is silently dropped."""
RUN_CELL = """async (i) => { const app = window.jupyterapp, notebook = app.shell.currentWidget.content;
  notebook.activeCellIndex = i; notebook.deselectAll(); await app.commands.execute('notebook:run-cell'); }"""  # noqa: E501
SAVE = "async () => await window.jupyterapp.shell.currentWidget.context.save()"
OUTPUT = """(i) => window.jupyterapp.shell.currentWidget.content.widgets[i].model.outputs.toJSON()
  .map(o => Array.isArray(o.text) ? o.text.join('') : (o.text || o.evalue || '')).join('')"""
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "none"},
}
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
    """Returns what is missing for a measurement in a browser, and how to get it; None where
    nothing is.
    """
    for module in ("playwright", "jupyterlab", "psutil"):
        try:
            __import__(module)
        except ImportError:
            return f"{module} is not installed: pip install {module}"
    return None if chromium() else "there is no Chromium on this machine: apt-get install chromium"


def chromium() -> str | None:
    """Returns the path of this machine's Chromium or Chrome."""
    return next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )


@contextlib.contextmanager
def jupyterlab(home: Path) -> Iterator[tuple[str, int]]:
    """Runs a server with settings of its own, which serves `home/files`; gives its address and
    process id.
    """
    (home / "files").mkdir()
    for extension, settings in SETTINGS.items():
        file = home / "settings" / "@jupyterlab" / f"{extension}.jupyterlab-settings"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(settings))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        f"--port={port}",
        "--LabApp.expose_app_in_browser=True",
        "--IdentityProvider.token=",
        "--ServerApp.password=",
        f"--ServerApp.root_dir={home / 'files'}",
    ]
    environment = os.environ | {name: str(home / place) for name, place in PLACES.items()}
    with (home / "server.log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        _wait_for_server(f"http://127.0.0.1:{port}", server, home / "server.log")
        yield f"http://127.0.0.1:{port}", server.pid
    finally:
        _end(server)


class Page:
    """A notebook in a browser window of its own, with a fresh kernel.

    Attributes:
        received: bytes that came through its web sockets.
    """

    def __init__(self, browser: Any, address: str, file: Path, cells: list[str]) -> None:
        import nbformat

        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        book.metadata["kernelspec"] = {
            "name": "python3",
            "display_name": "Python 3",
            "language": "python",
        }
        nbformat.write(book, file)
        self.received = 0
        self.context = browser.new_context(viewport={"width": 1300, "height": 1250})
        self.page = self.context.new_page()
        self.page.on("websocket", lambda channel: channel.on("framereceived", self._count))
        self.page.goto(f"{address}/lab/tree/{file.name}?reset")
        self.evaluate(READY)

    def run_cell(self, number: int) -> str:
        """Runs a cell to its end and returns what it printed."""
        self.evaluate(RUN_CELL, number)
        return self.evaluate(OUTPUT, number)

    def evaluate(self, script: str, argument: object = None) -> Any:
        """Runs a script in the page, which by itself would wait for ever.

        Raises:
            playwright.sync_api.Error: it failed, or has not ended after PATIENCE_S.
        """
        race = f"""(a) => Promise.race([({script})(a),
            new Promise((_, no) => setTimeout(() => no(new Error('too long')), {1000 * PATIENCE_S}))])"""  # noqa: E501
        return self.page.evaluate(race, argument)

    def _count(self, payload: str | bytes) -> None:
        self.received += len(payload)


def kernel_process(server_pid: int) -> Any:
    """Returns the newest kernel of a server, as a psutil process."""
    import psutil

    children = psutil.Process(server_pid).children(recursive=True)
    return max(
        (p for p in children if "ipykernel" in " ".join(p.cmdline())), key=lambda p: p.create_time()
    )


def _wait_for_server(address: str, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and server.poll() is None:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"{address}/api/status", timeout=2),
        ):
            return
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()[-2000:]}")


def _end(server: subprocess.Popen) -> None:
    """Ends a server and its kernels, and none but these."""
    import psutil

    kernels = psutil.Process(server.pid).children(recursive=True) if server.poll() is None else []
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(15)
    server.kill()
    server.wait()
    for kernel in kernels:
        with contextlib.suppress(psutil.NoSuchProcess):
            kernel.kill()
