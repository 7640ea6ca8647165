"""How torch's releases write a call of FlexAttention into a graph."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def MASK_MOD(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """What stands in `flex_constants`' layout where the graph has the predicate."""
    return q >= k


def flex_constants(
    q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Tensor], block: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The block mask as the operator `flex_attention` takes it, with `blocks` themselves and `MASK_MOD` at their places,
    the numbers of queries and of keys first; and the options of its kernel."""
    from torch.nn.attention import flex_attention

    with q.fake_mode:  # type: ignore[attr-defined]
        made: Any = flex_attention.BlockMask
        mask = made((q.shape[2], k.shape[2]), *blocks, (block, block), MASK_MOD)
        options = flex_attention._apply_kernel_options(q, k, v, True, None)
    return mask.as_tuple(), dict(options)
