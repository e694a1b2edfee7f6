"""Port: rewrites training scripts from one vendor's devices to all, where the result is certain.

To follow one file from the command line to the diff:

- `port_command` finds the files and reads their `project`: what the other files say about each one.
- `rewrite.port_source` rewrites one. It is the order of everything below.
- `facts` is what a rule may ask of a file. `survey`, `tree`, `device_numbers` and `facts` each extend the one before.
  `place` is the name of the device in the new file, and the line that chooses it.
- `decisions` visits each node and asks the `rules`, which return a `Rewrite`, a `Left` or None. A condition waits until
  its lines are decided.
- `imports` and `removed` clean up. At level trainer, `loop` recognises training loops and `trainer` replaces them.
- `report` prints the summary and the diff. `vendors` counts the lines that name a vendor.

To add a rule: a file in `rules/` with a `Rule` and its examples, which are tests and documentation, and its name in
`rules/__init__`.
"""

from accelcore_lint.port.rewrite import Outcome, port_source
from accelcore_lint.port.rule import Level, Note

__all__ = ["Level", "Note", "Outcome", "port_source"]
