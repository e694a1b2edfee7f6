"""The corpus: scripts as they are, and what each level makes of them."""

from pathlib import Path

from accelcore_lint.port import Level, port_source

FOLDER = Path(__file__).parent / "corpus"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


def source(name):
    return (FOLDER / f"{name}.py").read_text()


def expected(name, level):
    """What a level makes of a script; level trainer has a file only if it differs from level roles."""
    path = _path(name, level)
    return (path if path.exists() else _path(name, Level.ROLES)).read_text()


def _path(name, level):
    return FOLDER / "expected" / f"{name}.{level.value}.py"


def write_expected():
    """Write what the port makes of each script today: `python corpus.py`, and read the diff."""
    for name in NAMES:
        made = {level: port_source(source(name), level).source for level in Level}
        for level, text in made.items():
            _path(name, level).unlink(missing_ok=True)
            if level is not Level.TRAINER or text != made[Level.ROLES]:
                _path(name, level).write_text(text)


if __name__ == "__main__":
    write_expected()
