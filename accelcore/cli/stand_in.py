"""`accelcore run --apex`: a module that is called apex, for one process and those that it starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from accelcore.errors import ConfigurationError

__all__ = ["apex_path"]

_FOLDER = Path(__file__).parents[1] / "apex" / "stand_in"


def apex_path(environ: Mapping[str, str], folder: Path) -> str:
    """The PYTHONPATH with which `import apex` finds accelcore.apex; one line on stderr where it hides another.

    Args:
        environ: of the script.
        folder: which Python puts before that path: the script's, or for a module the working directory.

    Raises:
        ConfigurationError: there is an apex in that folder.
    """
    beside = next((path for path in (folder / "apex.py", folder / "apex" / "__init__.py") if path.exists()), None)
    if beside is not None:
        raise ConfigurationError(
            "--apex, and the script has an apex of its own",
            why=f"Python would find {beside} first",
            remedy="rename that one, or leave --apex out",
        )
    spec = find_spec("apex")
    if spec is not None and spec.origin is not None and not Path(spec.origin).is_relative_to(_FOLDER):
        try:
            found = f"apex {version('apex')}"
        except PackageNotFoundError:
            found = spec.origin
        sys.stderr.write(f"accelcore: --apex: the script imports accelcore.apex, not the installed {found}\n")
    return os.pathsep.join(filter(None, (str(_FOLDER), environ.get("PYTHONPATH"))))
