"""Configuration of the documentation, built by Sphinx."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util.inspect import signature, stringify_signature

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "plugins" / "npu_emulator"), str(ROOT / "plugins" / "npu")]

project = "accelcore"
copyright = "the accelcore authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build", "tests"]
default_role = "code"
myst_heading_anchors = 3

html_theme = "furo"
html_title = "accelcore"
html_static_path = ["static"]
html_css_files = ["site.css"]
copybutton_exclude = ".linenos, .gp, .go"

# Read for their docstrings, not run.
autodoc_mock_imports = ["accelcore.testing.support.options", "expecttest", "numpy", "safetensors", "torch", "torch_npu"]
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # an event is described once, under `Observer`
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_use_ivar = True  # attributes as a list, not as entries of several lines each
# A signature that is longer has a line for each parameter.
maximum_signature_line_length = 68
python_use_unqualified_type_names = True


def signature_of(app: Sphinx, what: str, name: str, value: Any, options: Any, shown: str, returns: str) -> Any:
    """Return the signature to show; a class with `__new__` in a base, as torch's stand-in has, has its `__init__`'s."""
    if what == "class" and "__init__" in vars(value) and value.__new__ is not object.__new__:
        own = signature(value.__init__, bound_method=True)
        shown, returns = stringify_signature(own, show_return_annotation=False, unqualified_typehints=True), None
    # Defaults that only show that an argument was not given.
    shown = re.sub(r" = _[A-Z_]+", lambda found: "" if found[0] == " = _MISSING" else " = ...", shown or "")
    return shown or None, returns


def setup(app: Sphinx) -> None:
    """Connect the function above."""
    app.connect("autodoc-process-signature", signature_of)
