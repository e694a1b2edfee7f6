"""Program that runs a script of others and records or replays it: `accelcore record` and `replay` start it.

Its arguments: `record` or `replay`; the folder; the options of `Record` or `Replay` as JSON, and `saves`, whether the
script's trainers save checkpoints; the script, or `-m` and a module, and its own arguments.
"""

from __future__ import annotations

import json
import sys
import warnings
from time import monotonic

from accelcore.cli.rank import script_of_arguments
from accelcore.errors import AccelError
from accelcore.parity.record import Record, rank_and_size
from accelcore.parity.replay import Replay
from accelcore.training.trainer import Trainer

_INVALID = 64  # the exit code of a request that is invalid, as of every command
_EVERY = 5.0  # seconds between two lines of progress


def main() -> None:
    """Run the script in the context of a `Record` or a `Replay`."""
    mode, folder, options, *sys.argv = sys.argv[1:]
    run = script_of_arguments()
    # Hooks on all modules find the models. That torch calls them once more for a compiled one does no harm here.
    warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")
    kind = _Shown if mode == "record" else _ShownReplay
    given, code = json.loads(options), _INVALID
    saves = given.pop("saves", True)
    try:
        context = kind(folder, **given)
        context.saves = saves
        with context:
            code = 1
            try:
                run()
            except SystemExit as end:  # a plain end by `sys.exit()` or after enough steps is an end as any other
                if end.code not in (None, 0):
                    raise
        if mode == "record" and rank_and_size()[0] == 0:
            sys.stderr.write(f"accelcore: {folder}: {_steps(context.done)} recorded\n")
    except AccelError as error:
        sys.stderr.write(f"accelcore: {error}\n")
        sys.exit(code)


def _steps(number: int) -> str:
    return f"{number} step{'s' * (number != 1)}"


class _Shown(Record):
    """Show progress on stderr, and end the script after the last step that was asked for."""

    saves, done = True, 0
    _next = monotonic() + _EVERY

    def begin(self, trainer: Trainer) -> None:
        super().begin(trainer)
        trainer.state.writes &= self.saves

    def _step_ended(self, step: int, *, is_last: bool) -> None:
        self.done = step
        if monotonic() >= self._next:
            done = _steps(step) if self._steps is None else f"{step} of {_steps(self._steps)}"
            sys.stderr.write(f"accelcore: {done} done\n")
            self._next = monotonic() + _EVERY
        if is_last:
            if step and rank_and_size()[0] == 0:
                done = "replayed" if isinstance(self, Replay) else "recorded"
                sys.stderr.write(f"accelcore: the script ends here, because the last step is {done}\n")
            sys.exit(0)


class _ShownReplay(_Shown, Replay):
    """The same for a replay."""


if __name__ == "__main__":
    main()
