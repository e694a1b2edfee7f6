"""The linter finds nothing in what accelcore itself shows as right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from accelcore_lint.lint import check

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Pages that show other people's scripts: the page of the linter's own rules, and loops as torch has them.
OTHERS = {"lint.md", "port.md", "why.md"}


def blocks(page):
    found = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    return found[1:] if page.parent.name == "moving" else found  # the first is the script before it is moved


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_has_no_finding(path):
    assert check(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in OTHERS], ids=lambda page: page.stem)
def test_a_page_has_no_finding(page):
    assert [finding for block in blocks(page) for finding in check(block)] == []
