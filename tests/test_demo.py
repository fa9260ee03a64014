"""`kit.demo`, in notebooks that are executed from a terminal."""

import nbformat

from kit.demo import execute

VIEW = """import contextvars, threading, time
from IPython.display import DisplayHandle
picture = DisplayHandle()
picture.display({"text/plain": "before"}, raw=True)
def refresh():
    time.sleep(0.5)
    picture.update({"text/plain": "after"}, raw=True)
threading.Thread(target=contextvars.copy_context().run, args=(refresh,)).start()"""


def test_picture_is_refreshed_while_another_cell_runs(tmp_path):
    """The dashboard updates its static image in the output of the cell that displays it, while
    another cell runs.
    """
    cells = [nbformat.v4.new_code_cell(source) for source in (VIEW, "time.sleep(2)")]
    notebook, executed = tmp_path / "notebook.ipynb", tmp_path / "executed.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), notebook)
    execute(notebook, executed)
    [output] = nbformat.read(executed, as_version=4).cells[0].outputs
    assert output.data["text/plain"] == "after"
