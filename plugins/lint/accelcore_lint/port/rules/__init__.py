"""The rules of a port, in the order in which they are asked about a node. One idea a file."""

from accelcore_lint.port.rule import Rule
from accelcore_lint.port.rules.amp import AUTOCAST, CUSTOM
from accelcore_lint.port.rules.availability import AVAILABILITY
from accelcore_lint.port.rules.conditions import CLASS, GUARDS, IS_CUDA, PLACE
from accelcore_lint.port.rules.device_calls import ALONE, WAIT
from accelcore_lint.port.rules.device_contexts import CONTEXTS
from accelcore_lint.port.rules.device_modules import MODULES
from accelcore_lint.port.rules.device_strings import CHOICES, STRINGS
from accelcore_lint.port.rules.leftovers import LEFTOVERS, SUMMARY
from accelcore_lint.port.rules.loading import LOADS, MAPS, PINS
from accelcore_lint.port.rules.memory import MEMORY
from accelcore_lint.port.rules.moves import MOVES
from accelcore_lint.port.rules.optimizers import OPTIMIZERS
from accelcore_lint.port.rules.process_group import BACKEND_NAMES, DEVICE_IDS, PROCESS_GROUP
from accelcore_lint.port.rules.replaced import REPLACED
from accelcore_lint.port.rules.replicas import REPLICAS
from accelcore_lint.port.rules.scaler import SCALER
from accelcore_lint.port.rules.seeds import SEEDS
from accelcore_lint.port.rules.switches import SWITCHES
from accelcore_lint.port.rules.typed_tensors import TYPED

RULES: tuple[Rule, ...] = (
    REPLACED, SUMMARY, SWITCHES, TYPED, ALONE, WAIT, CONTEXTS, MODULES, SEEDS, PROCESS_GROUP, DEVICE_IDS,
    CHOICES, AVAILABILITY, MOVES, AUTOCAST, CUSTOM, SCALER, MEMORY, OPTIMIZERS, REPLICAS, PINS,
    LOADS, MAPS, STRINGS, BACKEND_NAMES, GUARDS, CLASS, IS_CUDA, PLACE, *LEFTOVERS,
)  # fmt: skip
"""Rules for every vendor's word. The last ones claim what the others leave."""
