"""The formulas as routes: on every device, after all others."""

from __future__ import annotations

from accelcore.optim.formulas import FORMULAS, Formula
from accelcore.optim.route import Request, Route

__all__ = ["formula_routes"]

_PRIORITY = -20


def formula_routes() -> dict[str, list[Route]]:
    """By the name of each optimizer that has a formula, its route."""
    return {name: [_route(name, kind)] for name, kind in FORMULAS.items()}


def _route(name: str, kind: type[Formula]) -> Route:
    def supports(request: Request) -> str | None:
        for switch in ("fused", "foreach"):
            if switch in request.options:
                return f"say route=... instead of {switch}="
        for switch in ("capturable", "differentiable"):
            if any(request.values(switch, False)):
                return f"the formula is not {switch}"
        if not kind.by_element and any(parameter.is_complex() for parameter in request.parameters):
            return f"{name} is not defined for complex parameters"
        return None

    return Route("formula", kind, _PRIORITY, "any" if kind.by_element else "tensors", supports)
