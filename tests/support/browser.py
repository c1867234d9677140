"""The browser of the tests: Debian's Chromium without a window, driven by Selenium. Nothing is downloaded."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from selenium import webdriver
    from selenium.webdriver.remote.webelement import WebElement

PATIENCE = 30.0  # seconds: a test fails instead of hanging; no result depends on the value
MISSING = "needs Chromium and its driver: 'make browser' installs them where there is root and apt"
_ARGUMENTS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --disable-extensions --mute-audio "
    "--force-color-profile=srgb --hide-scrollbars --disable-background-timer-throttling"
)

_SELECTOR = "css selector"
Result = TypeVar("Result")


def programs() -> tuple[str, str] | None:
    """The browser and its driver, if this machine has both."""
    browser = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


class Browser:
    """One browser, with a few words that the tests need."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, address: str) -> None:
        self.driver.get(address)

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(_SELECTOR, selector)

    def text(self, selector: str = "main") -> str:
        return str(self.driver.execute_script("return document.querySelector(arguments[0])?.innerText || ''", selector))

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def wait_until(self, condition: Callable[[], Result], what: str) -> Result:
        """The first true result of a condition."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            with contextlib.suppress(Exception):
                if found := condition():
                    return found
            time.sleep(0.02)
        raise AssertionError(f"never: {what}; the page says: {self.text('body')[:800]}")

    def wait_for_text(self, text: str, selector: str = "main") -> None:
        self.wait_until(lambda: text in self.text(selector), f"{text!r} in {selector}")

    def press(self, *keys: str) -> None:
        """Press keys where the focus is."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def complaints(self) -> list[str]:
        """What the browser has complained about since the last call: errors of scripts, refused resources."""
        found = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [str(each["message"]) for each in found if each["level"] in ("SEVERE", "WARNING")]

    def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def dark(self, *, on: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


@contextlib.contextmanager
def started_browser() -> Iterator[Browser]:
    """A browser with an empty profile; raises `LookupError` where there is none."""
    from selenium import webdriver  # not above: every process that runs tests loads this module
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    found = programs()
    if found is None:
        raise LookupError(MISSING)
    profile = tempfile.mkdtemp(prefix="holdfast-browser-")
    options = Options()
    options.binary_location = found[0]
    for each in (*_ARGUMENTS.split(), f"--user-data-dir={profile}"):
        options.add_argument(each)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(found[1]))
    try:
        driver.set_page_load_timeout(PATIENCE)
        yield Browser(driver)
    finally:
        driver.quit()
        shutil.rmtree(profile, ignore_errors=True)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if programs() is None:
        pytest.skip(MISSING)
    with started_browser() as made:
        yield made


ENTER, ESCAPE, DOWN, TAB = "\ue007", "\ue00c", "\ue015", "\ue004"  # as the protocol of the driver names keys
