"""A call of every operator of torch's that draws random numbers, to be made on several devices.

A call is given a device. It is listed under the operator's name, with its overload.
"""

from __future__ import annotations

from functools import partial

import torch

aten = torch.ops.aten


def _operator(name):
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _call(name, *arguments, **options):
    """Tensors are moved to the device, but for numbers; `device=True` and `generator=True` are given one."""

    def call(device):
        def there(value):
            if isinstance(value, list):
                return [there(each) for each in value]
            return value.clone().to(device) if isinstance(value, torch.Tensor) and value.dim() else value

        named = {key: there(value) for key, value in options.items()}
        if "device" in named:
            named["device"] = device
        if "generator" in named:
            named["generator"] = torch.Generator().manual_seed(5)
        return _operator(name)(*map(there, arguments), **named)

    return call


ONES, EMPTY = torch.ones(5, 7), torch.empty(0)
RATES = torch.linspace(0.1, 0.9, 35).view(5, 7)
IMAGES, QUERY = torch.ones(2, 3, 4, 4), torch.linspace(-1, 1, 64).view(2, 2, 4, 4)
CALLS = {}


def _fills(name, *arguments):
    CALLS[f"{name}_"] = _call(f"{name}_", ONES, *arguments)
    CALLS[name] = _call(name, ONES, *arguments)
    CALLS[f"{name}.out"] = _call(f"{name}.out", ONES, *arguments, out=EMPTY)


for _name, _arguments in {
    "uniform": (1.0, 2.0), "exponential": (2.0,), "cauchy": (), "geometric": (0.3,), "log_normal": (),
}.items():  # fmt: skip
    _fills(_name, *_arguments)

CALLS |= {
    "normal_": _call("normal_", ONES, 1.0, 2.0),
    "normal_functional": _call("normal_functional", ONES),
    "normal.out": _call("normal.out", ONES, out=EMPTY),
    "normal.float_float": _call("normal.float_float", 0.0, 1.0, [5, 7], device=True),
    "normal.float_float_out": _call("normal.float_float_out", 0.0, 1.0, [5, 7], out=EMPTY),
    "normal.Tensor_Tensor": _call("normal.Tensor_Tensor", RATES, ONES),
    "normal.Tensor_float": _call("normal.Tensor_float", RATES, 2.0),
    "normal.float_Tensor": _call("normal.float_Tensor", 3.0, RATES),
    "normal.Tensor_Tensor_out": _call("normal.Tensor_Tensor_out", RATES, ONES, out=EMPTY),
    "normal.Tensor_float_out": _call("normal.Tensor_float_out", RATES, 2.0, out=EMPTY),
    "normal.float_Tensor_out": _call("normal.float_Tensor_out", 3.0, RATES, out=EMPTY),
    "bernoulli_.float": _call("bernoulli_.float", ONES, 0.3),
    "bernoulli_.Tensor": _call("bernoulli_.Tensor", ONES, RATES),
    "bernoulli": _call("bernoulli", RATES),
    "bernoulli.p": _call("bernoulli.p", ONES, 0.3),
    "bernoulli.out": _call("bernoulli.out", RATES, out=EMPTY),
    "bernoulli.Tensor": _call("bernoulli.Tensor", ONES, RATES),
    "bernoulli.Tensor_out": _call("bernoulli.Tensor_out", ONES, RATES, out=EMPTY),
    "bernoulli.float_out": _call("bernoulli.float_out", ONES, 0.3, out=EMPTY),
    "multinomial": _call("multinomial", RATES, 3),
    "multinomial.out": _call("multinomial.out", RATES, 9, True, out=EMPTY.long()),
    "poisson": _call("poisson", RATES * 9),
    "poisson.out": _call("poisson.out", RATES * 9, out=EMPTY),
    "binomial": _call("binomial", ONES * 9, RATES),
    "binomial.out": _call("binomial.out", ONES * 9, RATES, out=EMPTY),
    "_standard_gamma": _call("_standard_gamma", RATES),
    "_standard_gamma.out": _call("_standard_gamma.out", RATES, out=EMPTY),
    "_sample_dirichlet": _call("_sample_dirichlet", RATES),
    "_sample_dirichlet.out": _call("_sample_dirichlet.out", RATES, out=EMPTY),
    "native_dropout": _call("native_dropout", ONES, 0.3, True),
    "native_dropout.out": _call("native_dropout.out", ONES, 0.3, True, out0=EMPTY, out1=EMPTY.bool()),
    "scaled_dot_product_attention": _call("scaled_dot_product_attention", QUERY, QUERY, QUERY, None, 0.5),
    "_scaled_dot_product_attention_math": _call("_scaled_dot_product_attention_math", QUERY, QUERY, QUERY, None, 0.5),
}
for _name in ("dropout", "alpha_dropout"):
    CALLS[_name] = _call(_name, ONES, 0.3, True)
    CALLS[f"{_name}_"] = _call(f"{_name}_", ONES, 0.3, True)
    CALLS[f"feature_{_name}"] = _call(f"feature_{_name}", IMAGES, 0.3, True)
    CALLS[f"feature_{_name}_"] = _call(f"feature_{_name}_", IMAGES, 0.3, True)
for _form, _arguments in {"": (), "from": (3, 9), "to": (9,)}.items():
    _of = f".{_form}" if _form else ""
    CALLS[f"random_{_of}"] = _call(f"random_{_of}", ONES, *_arguments)
    CALLS[f"random{_of}"] = _call(f"random{_of}", ONES, *_arguments)
    CALLS[f"random.{_form}_out" if _form else "random.out"] = _call(
        f"random.{_form}_out" if _form else "random.out", ONES, *_arguments, out=EMPTY
    )
for _name, _size in {"rand": ([5, 7],), "randn": ([5, 7],), "randperm": (40,), "randint": (9, [5, 7])}.items():
    CALLS[_name] = _call(_name, *_size, device=True)
    CALLS[f"{_name}.generator"] = _call(f"{_name}.generator", *_size, generator=True, device=True)
    _out = EMPTY.long() if "i" in _name or "p" in _name else EMPTY
    CALLS[f"{_name}.out"] = _call(f"{_name}.out", *_size, out=_out)
    CALLS[f"{_name}.generator_out"] = _call(f"{_name}.generator_out", *_size, generator=True, out=_out)
for _form in ("low", "low_generator"):
    _own = {"generator": True} if "generator" in _form else {}
    CALLS[f"randint.{_form}"] = _call(f"randint.{_form}", 2, 9, [5, 7], **_own, device=True)
    CALLS[f"randint.{_form}_out"] = _call(f"randint.{_form}_out", 2, 9, [5, 7], **_own, out=EMPTY.long())
for _form, _arguments in {"": (9,), "Tensor": (torch.tensor(9),), "low_dtype": (2, 9)}.items():
    _of = f".{_form}" if _form else ""
    CALLS[f"randint_like{_of}"] = _call(f"randint_like{_of}", ONES, *_arguments)
    _of = f"{_form}_out" if _form else "out"
    CALLS[f"randint_like.{_of}"] = _call(f"randint_like.{_of}", ONES, *_arguments, out=EMPTY)
    _of = {"": "generator", "Tensor": "Tensor_generator", "low_dtype": "low_generator_dtype"}[_form]
    CALLS[f"randint_like.{_of}"] = _call(f"randint_like.{_of}", ONES, *_arguments, generator=True)
    CALLS[f"randint_like.{_of}_out"] = _call(f"randint_like.{_of}_out", ONES, *_arguments, generator=True, out=EMPTY)
for _name in ("rand_like", "randn_like"):
    CALLS[_name] = _call(_name, ONES)
    CALLS[f"{_name}.out"] = _call(f"{_name}.out", ONES, out=EMPTY)
    CALLS[f"{_name}.generator"] = _call(f"{_name}.generator", ONES, generator=True)
    CALLS[f"{_name}.generator_out"] = _call(f"{_name}.generator_out", ONES, generator=True, out=EMPTY)
for _name, _gates in {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}.items():
    _weights = [torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape)
                for shape in 2 * [(_gates * 4, 4), (_gates * 4, 4), (_gates * 4,), (_gates * 4,)]]  # fmt: skip
    _state = torch.zeros(2, 3, 4)
    _states = [_state, _state] if _name == "lstm" else _state
    _steps = torch.linspace(-1, 1, 60).view(5, 3, 4)
    CALLS[f"{_name}.input"] = _call(f"{_name}.input", _steps, _states, _weights, True, 2, 0.5, True, False, False)
    CALLS[f"{_name}.data"] = partial(
        lambda name, given, device: _operator(name)(
            given[0].to(device), torch.tensor([3] * 5), *[_there(each, device) for each in given[1:]],
            True, 2, 0.5, True, False,
        ),
        f"{_name}.data", (_steps.view(15, 4), _states, _weights),
    )  # fmt: skip


def _there(value, device):
    return [each.to(device) for each in value] if isinstance(value, list) else value.to(device)


def drawing():
    """The names of all operators of torch that draw, as its dispatcher knows them."""
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        if namespace == "aten" and torch.Tag.nondeterministic_seeded in _operator(rest).tags:
            yield rest


# What draws nothing, or only on the device that it is made for.
ELSEWHERE = {
    "_fused_sdp_choice": "chooses a kernel", "_nested_tensor_softmax_with_shape": "draws nothing",
    "_scaled_dot_product_flash_attention_for_cpu": "refuses dropout",
    **dict.fromkeys((
        "rrelu", "rrelu_", "rrelu_with_noise", "rrelu_with_noise_", "rrelu_with_noise.out",
        "rrelu_with_noise_functional",
    ), "refused in training: hardly anybody uses it"),
    "_scaled_dot_product_fused_attention_overrideable": "a vendor's to fill in",
    **dict.fromkeys((
        "_cudnn_attention_backward", "_cudnn_attention_forward", "_cudnn_init_dropout_state",
        "_cudnn_init_dropout_state.out", "_cudnn_rnn", "_cudnn_rnn.out", "_efficient_attention_forward",
        "_fill_mem_eff_dropout_mask_", "_flash_attention_forward", "_flash_attention_forward.quantized",
        "_flash_attention_forward_no_dropout_inplace", "_fused_dropout", "_fused_dropout.out", "_lstm_mps",
        "_lstm_mps.out", "_scaled_dot_product_attention_math_for_mps", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_cudnn_attention_backward", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention_backward", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention.quantized", "_triton_scaled_dot_attention",
        "_triton_scaled_dot_attention.out", "_cudnn_attention_forward_no_dropout_inplace", "miopen_rnn",
        "miopen_rnn.out",
    ), "a kernel of one device's own: it is refused there"),
    **dict.fromkeys((
        f"{name}.{overload}{out}" for name in ("rand", "randn") for overload in ("names", "generator_with_names")
        for out in ("", "_out")
    ), "names of dimensions, up to torch 2.10: torch refuses them where a kernel is in Python"),
}  # fmt: skip
