"""Become a command whose memory is limited: `python limited.py BYTES COMMAND...`, in a session of its own."""

from __future__ import annotations

import os
import resource
import sys

if __name__ == "__main__":
    size = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.setsid()
    os.nice(5)
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606  # what the caller built, no shell
