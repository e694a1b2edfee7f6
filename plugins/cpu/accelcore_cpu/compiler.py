"""Check for the C++ compiler that inductor needs on a CPU."""

from __future__ import annotations

import os

__all__ = ["missing_compiler"]


def missing_compiler() -> str | None:
    """Return why inductor cannot compile here, or None. CXX counts, as for inductor."""
    # Importing inductor takes seconds, which only those who compile should wait for.
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except OSError as error:
        return (
            f"the C++ compiler CXX={os.environ.get('CXX')!r} cannot be run: {error} (name one that can, or unset CXX)"
        )
    except InvalidCxxCompiler as error:
        return f"{str(error).strip().splitlines()[0]} (install g++, or name a compiler in CXX)"
    return None
