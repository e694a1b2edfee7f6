"""Configuration of the documentation, built by Sphinx."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

project = "accelcore"
copyright = "the accelcore authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
exclude_patterns = ["_build"]
autodoc_mock_imports = ["accelcore.testing.options", "safetensors", "torch"]  # read for its docstrings, not run
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_class_signature = "separated"
napoleon_google_docstring = True
default_role = "code"
myst_heading_anchors = 3
