"""The documentation does what it says: every Python block runs, every link and command exists."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from accelcore.torch_features import GET_KERNEL

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MOVING = sorted((ROOT / "docs" / "moving").glob("*.md"))
LINT = ROOT / "docs" / "lint.md"  # whose scripts are wrong on purpose; the linter's tests read them
WHY = ROOT / "docs" / "why.md"  # whose scripts test_why.py runs


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    if page not in (*MOVING, LINT, WHY)
    for number, block in enumerate(blocks(page), start=1)
]
RECIPES = blocks(ROOT / "docs" / "recipes.md")
STRICT = """import warnings
warnings.simplefilter('error')
warnings.filterwarnings('ignore', 'The epoch parameter in .scheduler.step')  # of torch 2.7, at its own SequentialLR
"""
STAND_INS = f"import sys\nsys.path.append({str(ROOT / 'tests')!r})\nimport stand_ins\n"


@pytest.fixture
def run(fork, tmp_path, monkeypatch):
    """Runs code in a folder of its own; what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(code):
        (tmp_path / "block.py").write_text(code, encoding="utf-8")
        done = fork(tmp_path / "block.py").finish()
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize("block", BLOCKS)
def test_a_python_block_runs_as_printed(block, run):
    if 'same="everywhere"' in block and not GET_KERNEL.present:
        pytest.skip(f"torch has no {GET_KERNEL}")
    shows_others = re.search(r"^(?:from|import) (peft|timm|torchmetrics|transformers)", block, re.M)
    # A recipe runs twice in one folder: the second time it resumes.
    whole = block + block if block in RECIPES else block
    printed = run(STAND_INS + whole if shows_others else STRICT + whole)
    for promised in re.findall(r"^ *print\(.*\)  # (.+)$", block, re.M):
        assert promised in printed


def test_the_moving_average_of_the_recipe_survives_a_resume(run):
    (block,) = (block for block in RECIPES if "AveragedModel" in block)
    again = block.replace("outputs/average", "outputs/again")
    half = again.replace("epochs(2)", "epochs(1)")
    shown = "print(ema.average.state_dict())\n"
    first, second = run(f"{block}{shown}print('second')\n{half}{again}{shown}").split("second\n")
    assert first == second


def test_blocks_for_ranks_run_on_two_as_printed(fork_ranks, tmp_path, monkeypatch):
    """In one job, because ranks take seconds to meet; a block that would leave it is only read."""
    found = [block for page in PAGES if page not in (LINT, WHY) for block in blocks(page) if "parallel=" in block]
    for block in found:
        before, draws, _ = block.partition("torch.rand")
        assert re.search(r"accel\.(join|distributed)\(\)", before), f"its ranks do not meet:\n{block}"
        assert not draws or "accel.runtime.seed(" in before, f"each rank draws other data:\n{block}"
    script = f"{STAND_INS}import os\n"
    stay = [block for block in found if "accel.join()" in block]
    for number, block in enumerate(stay):
        (tmp_path / str(number)).mkdir()  # some save to a folder of the same name
        script += f"os.chdir({str(tmp_path / str(number))!r})\n{block}print('ran', {number})\n"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "blocks.py").write_text(script, encoding="utf-8")
    for rank in [rank.finish() for rank in fork_ranks(tmp_path / "blocks.py", ACCEL_DEVICE="cpu")]:
        assert rank.returncode == 0, rank.stderr
        assert rank.stdout.count("ran") == len(stay) > 10
        assert "seems to be made for" not in rank.stderr  # a schedule for the updates of one rank


@pytest.mark.parametrize("page", MOVING, ids=lambda page: page.stem)
def test_a_script_that_is_moved_gives_the_losses_it_gave(page, run):
    """A page of these has two scripts, before and after."""
    before, after = blocks(page)
    losses = "\nimport json\nprint(json.dumps([float(loss) for loss in losses]))"
    found = json.loads(run(STRICT + after + losses).splitlines()[-1])
    assert found[-1] < found[0]
    package = re.search(r"^(?:from|import) (accelerate|lightning_fabric|mmengine|torch_npu)", before, re.M)
    needed = package and {"mmengine": "cv2"}.get(package[1], package[1])  # which mmengine imports
    if needed and find_spec(needed) is None:
        pytest.skip(f"the script as it was needs {needed}")
    assert found == pytest.approx(json.loads(run(before + losses).splitlines()[-1]), rel=1e-6, abs=1e-7)


def test_the_readme_shows_python_and_both_commands():
    readme = PAGES[0].read_text(encoding="utf-8")
    assert blocks(PAGES[0])
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert {"train", "test"} <= set(re.findall(r"(?:^|`)make ([a-z]+)", readme, re.M)) <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if not link.startswith("http"):
            path, _, heading = link.partition("#")
            target = (page.parent / path) if path else page
            assert target.exists(), link
            if heading:
                text = target.read_text(encoding="utf-8")
                text += "".join((target.parent / name).read_text() for name in re.findall(r"{include} (\S+)", text))
                headings = re.findall(r"^#+ (.+)$", text, re.M)
                assert heading in {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}, link
