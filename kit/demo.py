"""`python -m kit.demo`: runs the quickstart notebook from a terminal and keeps the executed copy
in build/demo.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import (
    CellExecutionComplete,
    CellExecutionError,
    CellTimeoutError,
    DeadKernelError,
)
from nbclient.util import ensure_async
from rich.console import Console
from rich.markup import escape
from rich.text import Text
from traitlets.config import Config

from cluster.files import write_atomic
from cluster.state import JobError
from kit.errors import ConfigError, RunError, kit_command
from kit.run import Run

REPOSITORY = Path(__file__).resolve().parent.parent
CELL_LIMIT_S = 900
NotebookError = (CellExecutionError, CellTimeoutError, DeadKernelError)


class TerminalClient(NotebookClient):
    """Runs a notebook and shows its progress in a terminal: which cell runs, how long each cell
    took, and the text of the cell's live view.
    """

    def __init__(
        self, document: nbformat.NotebookNode, directory: Path, sockets: str, console: Console
    ) -> None:
        super().__init__(
            document,
            # Unix sockets are used, since another process could take a free TCP port before the
            # kernel starts.
            config=Config(KernelManager={"transport": "ipc", "ip": f"{sockets}/kernel"}),
            timeout=CELL_LIMIT_S,
            # If the state of widgets were saved, the saved page would wait for a live kernel
            # instead of showing pictures.
            store_widget_state=False,
            record_timing=False,
            resources={"metadata": {"path": str(directory)}},
            on_cell_execute=self._started,
            on_cell_executed=self._ended,
        )
        self.console = console
        self.status = console.status("Starting a kernel")
        self.number = 0
        self.start = time.monotonic()
        self.total = sum(cell.cell_type == "code" for cell in document.cells)

    def _started(self, cell: Any, cell_index: int) -> None:
        self.number += 1
        self._show(cell)

    def _ended(self, cell: Any, cell_index: int, execute_reply: dict) -> None:
        mark = "[green]✔[/]" if execute_reply["content"]["status"] == "ok" else "[red]✖[/]"
        self.console.print(
            f"{mark} {time.monotonic() - self.start:6.1f} s  {self.number:>2}/{self.total}"
            f"  {cell.id}",
            highlight=False,
        )

    def _show(self, cell: Any, text: str = "") -> None:
        self.status.update(f"{self.number:>2}/{self.total}  {cell.id}  [dim]{escape(text)}[/]")

    async def _async_poll_output_msg(self, parent_msg_id: str, cell: Any, cell_index: int) -> None:
        """Processes the kernel's messages while a cell runs, until the cell has ended.

        nbclient ignores messages that belong to other cells. This method does not: a dashboard
        updates its saved picture while later cells run, and these messages belong to the cell that
        shows the dashboard.
        """
        assert self.kc is not None
        while True:
            message = await ensure_async(self.kc.iopub_channel.get_msg(timeout=None))
            if message["parent_header"].get("msg_id") == parent_msg_id:
                try:
                    self.process_message(message, cell, cell_index)
                except CellExecutionComplete:
                    return
            elif message["msg_type"] == "update_display_data":
                super().process_message(message, cell, cell_index)

    def process_message(self, msg: dict, cell: Any, cell_index: int) -> Any:
        """Processes one message of the kernel. If a cell updates its live view, the text of the
        view is also shown in the terminal.
        """
        if msg["msg_type"] == "update_display_data":
            self._show(cell, msg["content"]["data"].get("text/plain", ""))
        return super().process_message(msg, cell, cell_index)


def execute(notebook: Path, out: Path, *, console: Console | None = None) -> None:
    """Runs all cells of a notebook. Writes the executed copy to `out`, even after an error. The
    notebook itself is not changed.

    Raises:
        CellExecutionError: A cell has failed.
        CellTimeoutError: A cell took more than CELL_LIMIT_S seconds.
        DeadKernelError: The kernel has died.
    """
    document = nbformat.read(notebook, as_version=4)
    console = console or Console(quiet=True)
    try:
        with tempfile.TemporaryDirectory(prefix="kit-kernel-") as sockets:
            client = TerminalClient(document, notebook.parent, sockets, console)
            with client.status:
                client.execute()
    finally:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, nbformat.writes(document) + "\n")


def write_html(notebook: Path) -> Path:
    """Writes an executed notebook as an HTML page into the notebook's folder. Returns the file of
    the page.
    """
    from nbconvert import HTMLExporter  # The import takes a second.

    page, _ = HTMLExporter().from_filename(str(notebook))
    file = notebook.with_suffix(".html")
    write_atomic(file, page)
    return file


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo. Returns the exit code: 0 if all cells succeeded, 1 if a cell failed, 130 if
    the user stopped the demo.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--notebook", type=Path, default=REPOSITORY / "notebooks" / "00_quickstart.ipynb"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=REPOSITORY / "build" / "demo",
        help="folder of the executed copy",
    )
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    if not options.notebook.exists():
        console.print(
            f"[red]{escape(str(options.notebook))} does not exist.[/] Run this in a clone of the"
            " repository."
        )
        return 1
    executed = options.out / options.notebook.name
    code = 0
    runs = options.notebook.resolve().parent.parent / "runs"
    before = set(runs.glob("*"))
    try:
        execute(options.notebook, executed, console=console)
    except NotebookError as error:
        console.print(Text.from_ansi(str(error)), soft_wrap=True)
        code = 1
    except KeyboardInterrupt:
        console.print("Stopped.")
        code = 130
    results = {"executed notebook": executed, "page": write_html(executed)}
    for directory in sorted(set(runs.glob("*")) - before):
        results[f"run {directory.name}"] = directory
        if (figure := directory / "figure.png").exists():
            results["figure"] = figure
        _say_if_alive(directory, console)
    for name, place in results.items():
        console.print(f"{name:>22}  {place}", soft_wrap=True, markup=False, emoji=False)
    return code


def _say_if_alive(directory: Path, console: Console) -> None:
    """If the job of a run is still running, prints the commands to watch and to stop it. A job
    continues after its notebook by design.
    """
    try:
        alive = not Run.open(directory).job.status().state.is_final
    except (ConfigError, RunError, JobError):
        return
    if alive:
        watch, stop = (escape(kit_command(name, directory)) for name in ("watch", "stop"))
        console.print(
            f"[yellow]The job in {escape(str(directory))} goes on.[/] Watch: {watch}. End: {stop}",
            soft_wrap=True,
        )


if __name__ == "__main__":
    sys.exit(main())
