"""The corpus: scripts as they are, and what each level makes of them."""

from pathlib import Path

FOLDER = Path(__file__).parent / "corpus"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


def source(name):
    return (FOLDER / f"{name}.py").read_text()


def expected_path(name, level):
    return FOLDER / "expected" / f"{name}.{level.value}.py"


def write_expected():
    """Write what the port makes of each script today: `python corpus.py`, and read the diff."""
    from accelcore_lint.port import Level, port_source

    for name in NAMES:
        for level in Level:
            path = expected_path(name, level)
            path.parent.mkdir(exist_ok=True)
            path.write_text(port_source(source(name), level).source)


if __name__ == "__main__":
    write_expected()
