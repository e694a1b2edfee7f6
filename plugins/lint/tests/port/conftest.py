import socket
import sys
from collections import defaultdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # `corpus` and `port_runs`, also in the emulator's tests


def pytest_collection_modifyitems(items):
    """Try each case of a test at one level, the cases in turn at each; `full` tries all.

    The rules are the same for all levels but for what they write.
    """
    cases = defaultdict(list)
    for item in items:
        where = getattr(item, "callspec", None)
        is_own = where is not None and "level" in where.params and item.path.parent == Path(__file__).parent
        if is_own and item.get_closest_marker("full") is None:
            others = tuple((name, id(value)) for name, value in where.params.items() if name != "level")
            cases[item.path, item.originalname, others].append(item)
    for number, ((_, _, others), levels) in enumerate(cases.items()):
        chosen = (number + number // len(levels)) % len(levels)  # so that pairs of two axes meet both of two levels
        for item in levels if others else ():
            if item is not levels[chosen]:
                item.add_marker("full")


@pytest.fixture
def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
