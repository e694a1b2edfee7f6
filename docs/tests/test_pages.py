"""What can be said of the built pages without a browser: links, code that fits, the index of the search."""

from __future__ import annotations

import json
import re
import runpy
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from bs4 import BeautifulSoup
from packaging.version import Version

COLUMNS = 88
"""Of code, not of output: what a program prints (`text`) is as wide as it is."""
OLDEST_TORCH = Version("2.7")
ROOT = Path(__file__).parents[2]
NPU = ROOT / "plugins/npu/accelcore_npu/compatibility.py"
CUDA = ROOT / "plugins/cuda/accelcore_cuda/builds.py"


class Page(HTMLParser):
    """The anchors of a page and the links on it."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links = {""}, []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors.add(attributes.get("id") or "")
        self.links += [attributes[name] for name in ("href", "src") if attributes.get(name)]


@pytest.fixture(scope="module")
def pages(site):
    found = {path: Page(path) for path in site.rglob("*.html")}
    assert len(found) > 20
    return found


def test_links_and_anchors_lead_somewhere(site, pages):
    lost = set()
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file() or (target in pages and unquote(parts.fragment) not in pages[target].anchors):
                lost.add(f"{path.relative_to(site)}: {link}")
    assert not lost


def test_no_page_of_the_site_is_left_for_the_repository(site):
    sources = {path.stem for path in (ROOT / "docs").glob("*.md")}
    for path in site.rglob("*.html"):
        for link in re.findall(r'href="[^"]*?/([\w]+)\.md"', path.read_text()):
            assert link not in sources, f"{path.name}: {link}.md"


def test_the_versions_are_those_that_the_probes_know():
    page = (ROOT / "docs/install.md").read_text()
    npu, cuda = runpy.run_path(str(NPU)), runpy.run_path(str(CUDA))
    known = [(one.torch, one.cann, one.torch_npu) for one in npu["RELEASES"] if Version(one.torch) >= OLDEST_TORCH]
    assert re.findall(r"^\| ([\d.]+) \| ([\w.]+) \| ([\w.]+) \|$", page, re.M) == known
    drivers = {int(number): driver for number, driver in re.findall(r"^\| CUDA (\d+) .*\| ([\d.]+) \|$", page, re.M)}
    assert drivers == cuda["MINIMUM_DRIVERS"]


def test_code_fits(site):
    wide = []
    for path in site.rglob("*.html"):
        for block in BeautifulSoup(path.read_text(), "html.parser").select(
            "div[class^=highlight-]:not(.highlight-text) pre"
        ):
            wide += [f"{path.name}: {line}" for line in block.get_text().splitlines() if len(line) > COLUMNS]
    assert not wide


def test_the_search_knows_hookimpl(site):
    script = (site / "searchindex.js").read_text()
    index = json.loads(script.removeprefix("Search.setIndex(").rstrip().removesuffix(")"))
    places = index["terms"].get("hookimpl", [])
    found = {index["docnames"][place] for place in ([places] if isinstance(places, int) else places)}
    assert {"bring_your_own", "reference_backends"} <= found
