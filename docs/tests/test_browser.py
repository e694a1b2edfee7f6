"""The pages in a browser, headless Chromium: nothing scrolls sideways, and the search finds.

Skipped where there is no browser, unless ACCEL_REQUIRE_BROWSER=1.
"""

from __future__ import annotations

import os
import shutil
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
WIDTHS = (390, 1280)
GENERATED = ("genindex.html", "py-modindex.html", "search.html")

# Every element outside the page's own scrolling boxes that ends to the right of the window.
CUT_OFF = """
const boxes = "pre, .table-wrapper, .sidebar-drawer, .toc-drawer, .overlay";
return [...document.querySelectorAll("article *")]
    .filter(one => !one.closest(boxes) && one.getBoundingClientRect().right > innerWidth + 1)
    .map(one => one.tagName + ": " + one.textContent.slice(0, 60));
"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


def required():
    value = os.environ.get("ACCEL_REQUIRE_BROWSER", "")
    assert value in ("", "0", "1"), f"ACCEL_REQUIRE_BROWSER={value!r} is neither 0 nor 1"
    return value == "1"


@pytest.fixture(scope="module")
def browser():
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if not program or not driver:
        reason = f"no browser: {program or ' or '.join(BROWSERS)} and {driver or 'chromedriver'} are needed"
        pytest.fail(reason) if required() else pytest.skip(reason)
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in ARGUMENTS:
        options.add_argument(argument)
    running = webdriver.Chrome(options=options, service=Service(driver))
    yield running
    running.quit()


@pytest.fixture(scope="module")
def address(site):
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site))
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_scrolls_sideways(width, browser, address, site):
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    wide = {}
    for path in sorted(site.rglob("*.html")):
        if path.name not in GENERATED:
            browser.get(f"{address}/{path.relative_to(site)}")
            assert browser.execute_script("return innerWidth") == width
            cut_off = browser.execute_script(CUT_OFF)
            if cut_off or browser.execute_script("return document.documentElement.scrollWidth") > width:
                wide[path.name] = cut_off
    assert not wide


def test_the_search_finds_hookimpl(browser, address):
    browser.get(f"{address}/search.html?q=hookimpl")
    found = WebDriverWait(browser, 20).until(lambda page: page.find_elements(By.CSS_SELECTOR, "ul.search li a"))
    targets = " ".join(link.get_attribute("href") for link in found)
    assert "bring_your_own.html" in targets
    assert "reference_backends.html" in targets


def test_code_has_a_button_that_copies_it(browser, address):
    browser.get(f"{address}/index.html")
    buttons = WebDriverWait(browser, 20).until(lambda page: page.find_elements(By.CSS_SELECTOR, "button.copybtn"))
    assert len(buttons) == len(browser.find_elements(By.CSS_SELECTOR, "div.highlight pre"))
