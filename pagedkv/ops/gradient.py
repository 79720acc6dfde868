"""No op has a gradient, and a backward pass through one says so.

Left to itself torch warns and goes on with gradients missing; where it compiles it does not even warn. So each op has a kernel of
autograd's, which ties the results to the inputs by an `autograd.Function`. Its backward is an op that raises: a compiled backward
pass holds that op, and raises when it is run, not when it is traced.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import _C, Tensor
from torch.autograd import forward_ad

_library = torch.library.Library("pagedkv", "FRAGMENT")
_library.define("no_gradient(Tensor gradient, str op, SymInt[] size, ScalarType dtype) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def _refuse(op: str) -> None:
    raise NotImplementedError(f"pagedkv.{op} has no gradient: it is for inference (call it under torch.no_grad, or detach its inputs)")


_library.impl("no_gradient", lambda gradient, op, size, dtype: _refuse(op), "CompositeExplicitAutograd")
torch.library.register_fake("pagedkv::no_gradient", lambda gradient, op, size, dtype: gradient.new_empty(size, dtype=dtype), lib=_library)


class _Inference(torch.autograd.Function):
    """Ties what `run` returns, which may be one of the inputs, to the inputs."""

    @staticmethod
    def forward(ctx, op: str, run: Callable, *inputs: Tensor):
        results = run()
        ctx.op, ctx.inputs = op, [(x.shape, x.dtype) for x in inputs]
        ctx.mark_dirty(*(x for x in inputs if x is results))
        return results

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        needed = zip(ctx.inputs, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(torch.ops.pagedkv.no_gradient(gradients[0], ctx.op, *x) if is_needed else None for x, is_needed in needed)


def without_gradient(op: torch._ops.OpOverload, kernels: dict[str, Callable]) -> Callable:
    """The autograd kernel of an op, which has `kernels` for its device keys.

    Where no gradient is asked for, it calls the kernel of a plain tensor's device itself: another turn through the dispatcher costs
    as much as a small op. Where anything else has a say (a mode, a wrapped tensor), the dispatcher goes on.
    """
    name, redispatch = op._schema.name.partition("::")[2], op._handle.redispatch_boxed
    direct = {
        _C.DispatchKeySet(getattr(_C.DispatchKey, device)).add(getattr(_C.DispatchKey, f"Autograd{device}")).raw_repr(): kernel
        for device, kernel in kernels.items()
    }
    written = [i for i, a in enumerate(op._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    is_grad_enabled, any_requires_grad, below = torch.is_grad_enabled, _C._any_requires_grad, _C._after_autograd_keyset

    def kernel(keyset, *args, **kwargs):
        if forward_ad._current_level >= 0:
            _refuse_tangents(name, *args, *kwargs.values())
        if not (is_grad_enabled() and any_requires_grad(*args, **kwargs)):
            plain = direct.get(keyset.raw_repr())
            return redispatch(keyset & below, *args, **kwargs) if plain is None else plain(*args, **kwargs)

        def run():
            with _C._AutoDispatchBelowAutograd():
                return redispatch(keyset & below, *args, **kwargs)

        inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if op._schema.returns:
            return _Inference.apply(name, run, *inputs)
        run()
        for x in (args[i] for i in written):
            if x.is_floating_point():
                _Inference.apply(name, lambda x=x: x, *inputs)
        return None

    return kernel


def _refuse_tangents(op: str, *arguments) -> None:
    if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in arguments):
        _refuse(op)
