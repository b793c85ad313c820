"""Triton kernels run in tests on a card if there is one, else in the interpreter.

This has to be imported before any Triton kernel. Three faults of the interpreter (Triton 3.6)
are mended: it truncates to bfloat16 where the hardware rounds, multiplies matrices of
bfloat16 as if their bits were integers, and cannot count to a tensor with numpy 2.4. It also
prepares Triton's modules again for every call of a function, which takes most of the time.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_TRITON = importlib.util.find_spec("triton") is not None


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor
    builder = interpreter.InterpreterBuilder
    call = interpreter.InterpretedFunction.__call__
    cast = builder.cast_impl

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def rounding_cast(self: Any, source: Any, target: Any) -> Any:
        kinds = source.dtype.scalar, target.scalar
        if kinds == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.array(source.data)).to(torch.bfloat16)
            data = rounded.view(torch.int16).numpy().view(np.uint16)
        elif kinds == (tl.bfloat16, tl.float32):
            data = (source.data.astype(np.uint32) << 16).view(np.float32)
        else:
            return cast(self, source, target)
        return interpreter.TensorHandle(data, target.scalar)

    def exact_dot(self: Any, a: Any, b: Any, start: Any, *_: Any) -> Any:
        # In float64 the position of a row inside the matrix does not show, unlike in float32.
        wide = [
            rounding_cast(self, x, tl.float32).data if x.dtype.scalar == tl.bfloat16 else x.data
            for x in (a, b)
        ]
        product = np.matmul(*wide, dtype=np.float64).astype(start.data.dtype)
        return interpreter.TensorHandle(product + start.data, start.dtype.scalar)

    patched = set()

    def call_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        # What the kernel patched for its launch holds for our functions too.
        module = self.fn.__module__
        if module in patched or not module.startswith("triton."):
            return self.rewrite()(*args, **kwargs)
        patched.add(module)
        return call(self, *args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call_function
    interpreter._patch_lang_tensor = patch_tensor_and_index
    builder.cast_impl, builder.create_dot = rounding_cast, exact_dot


if HAS_TRITON and DEVICE == "cpu":
    _interpret()
