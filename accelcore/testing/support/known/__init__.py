"""Results of operators that are computed by hand, so that no other device can share the mistake, by their kind.

`KNOWN` has for each result, in words, the function that computes it on a device, and the numbers that are right.
"""

from accelcore.testing.support.known.arguments import KNOWN_ARGUMENTS
from accelcore.testing.support.known.forms import KNOWN_FORMS
from accelcore.testing.support.known.many import KNOWN_MANY
from accelcore.testing.support.known.places import KNOWN_PLACES
from accelcore.testing.support.known.unsampled import KNOWN_UNSAMPLED
from accelcore.testing.support.known.values import KNOWN_VALUES

KNOWN = {**KNOWN_VALUES, **KNOWN_FORMS, **KNOWN_MANY, **KNOWN_PLACES, **KNOWN_ARGUMENTS, **KNOWN_UNSAMPLED}
