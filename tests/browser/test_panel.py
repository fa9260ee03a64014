"""The planner's panel of notebook 02 in a real JupyterLab: light theme, dark theme, narrow window,
and without a kernel.
"""

import io

import numpy as np
import pytest
from PIL import Image

from tests.support.lab import Notebook

pytestmark = pytest.mark.slow
CELL = """import kit
from kit.estimate import Panel
Panel('gpt-175b', 'frontier',
    kit.Plan(tensor_parallel=4, pipeline_parallel=16, data_parallel=2, zero_stage=1,
    global_batch_size=640, recompute='full', precision='bf16'))"""
DARK = "async () => await jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})"  # noqa: E501
END_KERNELS = "async () => await jupyterapp.serviceManager.sessions.shutdownAll()"


def test_panel_follows_degrees_and_saves_a_picture(browser, lab):
    """The panel also prints its plan, refuses an impossible layout, and changes to a dark theme."""
    notebook = Notebook(browser, lab, [CELL], "panel.ipynb")
    notebook.open()
    notebook.run_cell(0)
    picture = notebook.page.locator(".kit-panel img")
    before = picture.get_attribute("alt")
    assert "Memory: " in before and "Step: " in before and "risk of running out" in before
    still = notebook.page.locator("img[alt='the panel']")
    assert still.count() == 1 and not still.is_visible(), "a live panel needs no still"

    def give(degree: str) -> None:
        tensor = notebook.page.get_by_label("tensor")
        tensor.fill(degree)
        tensor.press("Enter")

    give("8")
    notebook.until(lambda: picture.get_attribute("alt") != before)
    notebook.click("Plan(...)")
    plan = "kit.Plan(tensor_parallel=8, pipeline_parallel=16"
    notebook.until(lambda: plan in notebook.text(".jp-OutputArea"))
    notebook.photograph("panel-light")
    give("7")
    refused = "Impossible: devices: 128 is no multiple"
    notebook.until(lambda: refused in notebook.text("[role=alert]"))
    assert not still.is_visible(), "the saved picture is of another layout"
    give("4")
    notebook.until(lambda: picture.count() == 1 and picture.get_attribute("alt") == before)

    notebook.evaluate(DARK)
    notebook.page.set_viewport_size({"width": 700, "height": 1250})
    notebook.page.wait_for_timeout(300)
    notebook.photograph("panel-dark-narrow")
    shown = picture.evaluate("image => getComputedStyle(image).filter")
    assert "invert" in shown, "dark as its page"
    engine = notebook.page.get_by_label("engine")
    assert engine.input_value() == "native", "the engine that is estimated is shown"

    live, left = notebook.save().cells[0].outputs
    assert "widget-view" in str(live.data)
    assert {"image/png", "text/html"} <= set(left.data), "a still is saved"

    notebook.evaluate(END_KERNELS)
    notebook.open(width=700)
    notebook.page.wait_for_selector("img[alt='the panel']", state="visible")
    still = notebook.page.locator("img[alt='the panel']")
    notebook.until(lambda: still.evaluate("image => image.naturalWidth") > 0)
    live = notebook.page.locator(".kit-panel img")
    assert live.count() == 0, "no kernel has the live panel any more"
    pixels = np.asarray(Image.open(io.BytesIO(still.screenshot())).convert("L"))
    assert np.median(pixels) < 60, "the saved picture is as dark as its page"
    notebook.photograph("panel-still-dark")
    notebook.context.close()
