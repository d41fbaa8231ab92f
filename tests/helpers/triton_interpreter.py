"""Run Triton kernels on the CPU: import this before any module that defines one.

With TRITON_INTERPRET=1 Triton executes a kernel's Python line by line on NumPy arrays.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import triton
from triton.runtime import interpreter

if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
    # NumPy 2.4 no longer converts one-element arrays to int, which loop bounds need (triton issue 9171, fixed in 3.7).
    _patch = interpreter._patch_lang_tensor

    def _patch_lang_tensor(tensor: type, scope: interpreter._LangPatchScope) -> None:
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = _patch_lang_tensor

# A device function called by a kernel patches triton.language once more, which its kernel has done already and which
# takes most of the interpreter's time. Only the standard library's functions use triton.language.core, patched once.
_patched: set[int] = set()


def _call(self: interpreter.InterpretedFunction, *args: object, **kwargs: object) -> object:
    names = self.fn.__globals__
    if id(names) not in _patched and any(value is triton.language.core for value in names.values()):
        interpreter._patch_lang(self.fn)
        _patched.add(id(names))
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


interpreter.InterpretedFunction.__call__ = _call
