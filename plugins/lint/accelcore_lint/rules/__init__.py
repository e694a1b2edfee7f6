"""The rules, one a file. The first digit of a code is the family: 1 one device only, 2 impostors, 3 always wrong."""

from __future__ import annotations

from accelcore_lint.rule import Rule
from accelcore_lint.rules import (
    around_wrapper,
    autocast_backward,
    backend_settings,
    beside_trainer,
    data_parallel,
    device_choice,
    device_draw,
    device_ids,
    device_string,
    divided_loss,
    early_clip,
    impostor,
    item_each_step,
    late_change,
    map_location,
    process_group,
    rank_variables,
    scaler_bf16,
    schedule_first,
    schedule_loop,
    set_epoch,
    short_window,
    silent_skip,
    token_mean,
    trainer_save,
    trainer_schedule,
    typed_tensor,
    unsafe_load,
    vendor_amp,
    vendor_import,
    vendor_move,
    vendor_optimizer,
    vendor_runtime,
    zero_grad,
)

UNKNOWN = "ACC001"
"""Code of a comment `# accel: ignore[...]` that ignores nothing: its codes are unknown, or missing."""

_MODULES = (
    silent_skip,
    vendor_move,
    device_string,
    device_choice,
    vendor_runtime,
    typed_tensor,
    map_location,
    data_parallel,
    device_ids,
    process_group,
    rank_variables,
    backend_settings,
    vendor_import,
    vendor_optimizer,
    vendor_amp,
    device_draw,
    impostor,
    early_clip,
    schedule_first,
    schedule_loop,
    zero_grad,
    divided_loss,
    short_window,
    token_mean,
    late_change,
    set_epoch,
    unsafe_load,
    around_wrapper,
    autocast_backward,
    scaler_bf16,
    item_each_step,
    beside_trainer,
    trainer_schedule,
    trainer_save,
)

RULES: dict[str, Rule] = {module.RULE.code: module.RULE for module in _MODULES}
"""All rules by their codes, in the order of the page."""
