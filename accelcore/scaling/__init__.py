"""Loss scaling: the contract of a scaler, the static and the dynamic scale, their settings and state.

Precision is decided elsewhere; a scaler only multiplies losses, unscales gradients and skips overflowed steps.
"""
