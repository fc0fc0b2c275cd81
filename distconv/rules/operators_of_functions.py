"""Operators of functions, such as `flex_attention` and `while_loop`: with shards they are refused in one line.

Torch knows them as higher-order operators. None has a schema, and they do not reach the rules of distributed tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from distconv.private_names import UNRULED, lacks
from distconv.tensors.mesh import is_ours
from distconv.tensors.refusal import complete, operands_of, refuse
from distconv.tensors.replacements import replace, until_put_back
from distconv.tensors.user_lines import asked_for

WHY = "an operator of functions knows no shards; accepted: the same as plain Python or torch.nn.functional"


@until_put_back
def refuse_operators_of_functions() -> None:
    """Makes operators of functions say, from now on, that they cannot run on shards."""
    if lacks(UNRULED):
        return  # torch's own error says less
    replace(HigherOrderOperator, "dispatch", _refusing(HigherOrderOperator.dispatch))


def _refusing(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def dispatch(operator: Any, key: Any, /, *args: Any, **kwargs: Any) -> Any:
        if key == DispatchKey.Python and _get_current_dispatch_mode() is None:
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor) and is_ours(x.device_mesh)]
            if tensors and DTensor not in operator.python_key_table:
                raise complete(refuse(operator.name(), WHY), operator.name(), operands_of(tensors), asked_for)
        return stock(operator, key, *args, **kwargs)

    return dispatch
