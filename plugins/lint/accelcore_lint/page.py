"""The rules as text: for `--explain`, and for the page `docs/lint.md` below its mark."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from accelcore_lint.rule import Rule
from accelcore_lint.rules import RULES

MARK = "<!-- The rest is made from the rules: python -m accelcore_lint.page docs/lint.md -->"
"""Line of the page below which everything is made."""


def section(rule: Rule, *, level: str = "") -> str:
    """Return the section of a rule: what it is about, an example that it finds, and one that it does not."""
    parts = [f"{level}{rule.code} {rule.name}", rule.about]
    for label, example in (("Found", rule.found), ("Not found", rule.clean)):
        code = textwrap.dedent(example).strip("\n")
        parts.append(f"{label}:\n\n```python\n{code}\n```")
    return "\n\n".join(parts)


def rules() -> str:
    """Return the sections of all rules, as they stand in `docs/lint.md`."""
    families = {"1": "One device only", "2": "Impostors", "3": "Wrong on any device"}
    parts = []
    for family, title in families.items():
        parts.append(f"## {title}")
        parts += [section(rule, level="### ") for rule in RULES.values() if rule.code[3] == family]
    return "\n\n".join(parts) + "\n"


def main(page: Path) -> None:
    """Write the sections into a page, below its mark."""
    text = page.read_text(encoding="utf-8")
    page.write_text(text[: text.index(MARK) + len(MARK)] + "\n\n" + rules(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
