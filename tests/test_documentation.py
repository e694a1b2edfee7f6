"""The documentation does what it says: every Python block runs, every link and command exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S), start=1)
]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_python_block_runs_as_printed(block, fork, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "block.py").write_text(f"import warnings\nwarnings.simplefilter('error')\n{block}")
    done = fork(tmp_path / "block.py").finish()
    assert done.returncode == 0, done.stderr


def test_the_readme_shows_python_and_both_commands():
    readme = PAGES[0].read_text()
    assert len(re.findall(r"^```python", readme, re.M)) >= 2
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {"train", "test"} <= set(re.findall(r"(?:^|`)make ([a-z]+)", readme, re.M)) <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if not link.startswith("http"):
            path, _, heading = link.partition("#")
            target = (page.parent / path) if path else page
            assert target.exists(), link
            if heading:
                headings = re.findall(r"^#+ (.+)$", target.read_text(), re.M)
                assert heading in {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}, link
