"""Fixtures for tests of the dashboard: its front end runs in headless Chromium, its kernel side in
the test's process. A simulated connection takes the place of Jupyter's.
"""

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.monitor.curves import PlotRange
from kit.monitor.widget import Monitor
from kit.run import Run
from tests.support.lab import Lab, headless, photograph, why_not

PAGE = (Path(__file__).parent / "page.html").read_text()
DARK = """document.body.style.setProperty('--jp-layout-color1', '#1e1e1e');
document.body.style.setProperty('--jp-ui-font-color1', '#eee');
document.body.style.setProperty('--jp-ui-font-color2', '#b5b5b5'); document.body.dataset.theme = 'dark';"""  # noqa: E501


SENT = "charts metrics frame window facts alerts heat log settings notes".split()


@pytest.fixture(scope="session")
def browser() -> Iterator:
    """Yields a headless Chromium browser that is installed on this machine."""
    if missing := why_not():
        pytest.skip(missing)
    with headless() as started:
        yield started


@pytest.fixture(scope="session")
def lab(browser, reader_python, tmp_path_factory) -> Iterator[Lab]:
    """Yields a JupyterLab server in which the built wheel is installed. The server has its own
    folder.
    """
    server = Lab(
        reader_python(), tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("served")
    )
    yield server
    server.stop()


class Quiet(Monitor):
    """Dashboard without its background threads. It reads the run only when a test calls a
    method.
    """

    def _follow_metrics(self) -> None: ...

    def _follow_job(self) -> None: ...

    def _keep_beating(self) -> None: ...


class Screen:
    """Browser page that shows a run's dashboard. The dashboard's kernel side, a widget in the
    test's process, answers the messages of the page.
    """

    def __init__(
        self, window: "Window", run: Run, *, dark: bool = False, before: str = "", **options
    ) -> None:
        self.page, self.widget, self.busy = window.page, Quiet(run, **options), False
        self.dashboard, window.screen, page = self.widget.dashboard, self, window.page
        page.set_content(PAGE % (Monitor._css, base64.b64encode(Monitor._esm.encode()).decode()))
        page.wait_for_function("window.ready")
        if dark:
            page.evaluate(f"() => {{ {DARK} }}")
        if before:
            page.evaluate(before)
        self.tick()
        page.evaluate("start()")
        page.wait_for_selector(".kit-monitor[data-points]")
        self.settle()

    def answer(self, message: dict) -> None:
        """Passes a message of the page to the widget, as the Jupyter kernel does, and sends the new
        state back.
        """
        if not self.busy:
            self.widget._on_message(self.widget, message, [])
            self.tick()

    def tick(self) -> None:
        """Reads the run once and sends the new state to the page."""
        self.dashboard.catch_up()
        self.widget._send_frame()
        self.widget._send_facts()
        sent = {name: getattr(self.widget, name) for name in SENT}
        for name in ("window", "heat"):
            sent[name] = {"base64": base64.b64encode(sent[name]).decode()}
        self.page.evaluate("put", sent)

    @property
    def view(self) -> PlotRange:
        return self.widget.view

    def refresh(self) -> None:
        """Reads the run once, sends the new state to the page and waits until the page has drawn
        it.
        """
        self.tick()
        self.settle()

    def settle(self, ms: int = 250) -> None:
        self.page.wait_for_timeout(ms)

    def sent(self, kind: str) -> list[dict]:
        return [message for message in self.page.evaluate("sent") if message["type"] == kind]

    def label(self, name: str) -> str:
        """Returns the accessible label (aria-label) of the picture called `name`."""
        return self.page.get_by_role("img", name=name).get_attribute("aria-label")

    def data(self, name: str) -> str:
        """Returns the attribute data-`name` of the dashboard's HTML element."""
        return self.page.locator(".kit-monitor").get_attribute(f"data-{name}")

    def click(self, name: str) -> None:
        self.page.get_by_role("button", name=name).click()

    def text(self, selector: str) -> str:
        return self.page.locator(selector).first.inner_text()

    def coloured(self, pane: int, colour: str) -> int:
        """Returns the number of canvas pixels of chart `pane` whose colour is close to `colour`
        (#rrggbb).
        """
        wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        return self.page.evaluate(
            """([pane, wanted]) => { const c = document.querySelectorAll('.kit-plot canvas')[pane];
            const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; let n = 0;
            for (let i = 0; i < d.length; i += 4)
              if (d[i + 3] > 200 && wanted.every((w, k) => Math.abs(d[i + k] - w) < 40)) n++; return n; }""",  # noqa: E501
            [pane, wanted],
        )

    def photograph(self, name: str) -> None:
        photograph(self.page, name, whole=True)


class Window:
    """Browser window that records the errors and the network requests of its pages."""

    def __init__(self, browser) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.screen: Screen | None = None
        self.page = browser.new_context().new_page()
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", self._asked)
        self.page.expose_function("kernel", self._answer)

    def open(
        self,
        run: Run,
        *,
        width: int = 1180,
        height: int = 900,
        address: str = "about:blank",
        **options,
    ) -> Screen:
        """Opens an empty page in the window and shows the dashboard of `run` in it. The browser
        stores settings only for pages with an `address`, such as that of an empty file.
        """
        self.page.goto(address)
        self.page.set_viewport_size({"width": width, "height": height})
        return Screen(self, run, **options)

    def _answer(self, message: dict) -> None:
        if self.screen:
            self.screen.answer(message)

    def _asked(self, request) -> None:
        if request.url.startswith("http"):
            self.requests.append(request.url)


@pytest.fixture(scope="session")
def window(browser) -> Iterator[Window]:
    """Yields the window in which all screens of a test module are opened, one after the other."""
    opened = Window(browser)
    yield opened
    opened.page.context.close()


@pytest.fixture
def open_screen(window) -> Iterator:
    """Yields a function that shows a run's dashboard in an empty page. The test fails if the page
    throws an error or uses the network.
    """
    window.errors.clear()
    window.requests.clear()
    yield window.open
    window.page.goto("about:blank")
    assert not window.errors, window.errors
    assert not window.requests, f"the page asked the network: {window.requests}"
