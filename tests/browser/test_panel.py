"""The panel of notebook 02 in a real JupyterLab: light, dark, narrow, and without a kernel."""

import pytest

from tests.browser.lab import Notebook

pytestmark = pytest.mark.slow
CELL = (
    "import kit\nfrom kit.estimate import Panel\nPanel('gpt-175b', 'frontier',"
    " kit.Plan(tensor_parallel=4, pipeline_parallel=16, data_parallel=2, zero_stage=1,\n"
    "    global_batch_size=640, recompute='full', precision='bf16'))"
)
DARK = (
    "async () => await window.jupyterapp.commands.execute('apputils:change-theme', {theme:"
    " 'JupyterLab Dark'})"
)


def test_panel_follows_refuses_writes_and_leaves_a_still(browser, lab):
    notebook = Notebook(browser, lab, [CELL], "panel.ipynb")
    notebook.open()
    notebook.run_cell(0)
    picture = notebook.page.locator(".kit-panel img")
    before = picture.get_attribute("alt")
    assert "Memory: " in before and "Step: " in before and "risk of running out" in before
    still = notebook.page.locator("img[alt='the panel']")
    assert still.count() == 1 and not still.is_visible(), "a live panel needs no still"

    tensor = notebook.page.get_by_label("tensor")
    tensor.fill("8")
    tensor.press("Enter")
    notebook.until(lambda: picture.get_attribute("alt") != before)
    notebook.click("Plan(...)")
    notebook.until(
        lambda: (
            "kit.Plan(tensor_parallel=8, pipeline_parallel=16" in notebook.text(".jp-OutputArea")
        )
    )
    notebook.photograph("panel-light")
    tensor.fill("7")
    tensor.press("Enter")
    notebook.until(
        lambda: "Impossible: devices: 128 is no multiple" in notebook.text("[role=alert]")
    )
    tensor.fill("4")
    tensor.press("Enter")
    notebook.until(lambda: picture.count() == 1 and picture.get_attribute("alt") == before)

    notebook.evaluate(DARK)
    notebook.page.set_viewport_size({"width": 700, "height": 1250})
    notebook.page.wait_for_timeout(300)
    notebook.photograph("panel-dark-narrow")
    assert "invert" in picture.evaluate("image => getComputedStyle(image).filter"), (
        "dark as its page"
    )

    live, left = notebook.save().cells[0].outputs
    assert "widget-view" in str(live.data) and {"image/png", "text/html"} <= set(left.data), (
        "a still is saved"
    )
    notebook.context.close()
