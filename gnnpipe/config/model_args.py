"""Keyword arguments of the model, as ``--model-args`` gives them."""

from __future__ import annotations

import ast
from typing import Any

from gnnpipe.errors import InputError


def model_args(text: str) -> dict[str, Any]:
    """Return the arguments in ``text`` by name; values are Python literals.

    Raises ``InputError`` for anything but keyword arguments, or a value that is no literal.

    >>> model_args("heads=8, aggr='max'")
    {'heads': 8, 'aggr': 'max'}
    """
    start = f"--model-args {text!r}: "
    hint = 'try keyword arguments as in Python: "heads=8" or "alpha=0.2, theta=1.0"'
    try:
        call = ast.parse(f"model({text})", mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise InputError(f"{start}{getattr(error, 'msg', error)}; {hint}") from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise InputError(f"{start}not keyword arguments alone; {hint}")
    found: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise InputError(f"{start}not keyword arguments alone; {hint}")
        if keyword.arg in found:
            raise InputError(f"{start}{keyword.arg} is given twice; leave one out")
        try:
            found[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, RecursionError):
            value = ast.unparse(keyword.value)
            raise InputError(
                f"{start}{value} is no number, text, list or other literal; text needs quotes: "
                f"{keyword.arg}={value!r}"
            ) from None
    return found
