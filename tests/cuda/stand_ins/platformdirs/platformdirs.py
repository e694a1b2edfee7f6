"""Stand-in for platformdirs: the user's cache folder as on Linux."""

import os
from pathlib import Path


def user_cache_dir(appname):
    return os.fspath(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", appname))
