"""Linter for PyTorch training scripts, and `port`, which rewrites them.

The linter parses scripts with `ast`, and never imports or runs them. It needs neither torch nor accelcore.

`lint_command` finds the `files`, `run` lints them in several processes, and `lint.check` lints one script: each of the
`rules` gets a `Script`. `names` says what a name stands for, `flow` what a training loop does in which order.
To add a rule: a file in `rules/`, its name in `rules/__init__`, and `python -m accelcore_lint.page docs/lint.md`.
"""

from __future__ import annotations

__version__ = "0.1.0"
