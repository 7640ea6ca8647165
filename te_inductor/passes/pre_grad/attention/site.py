"""A place of a graph that computes attention, and what was decided about it."""

from dataclasses import dataclass, field

from torch import fx

from te_inductor.diagnostics import Refusal
from te_inductor.passes.pre_grad.attention.added import Added
from te_inductor.passes.pre_grad.attention.expressions import Expr
from te_inductor.passes.pre_grad.attention.masks import Mask


@dataclass
class AttentionCall:
    """What the program computes there."""

    node: fx.Node
    q: fx.Node  # (B, H, L, D)
    k: fx.Node  # (B, KV heads, S, D)
    v: fx.Node  # (B, KV heads, S, D of v)
    given: fx.Node | None = None  # the mask that the program made, or one of several
    scale: float | None = None  # None: one over the root of the width
    dropout: float = 0.0
    causal: bool = False  # as torch's function is told
    softcap: float | None = None  # of scores, in attention by hand
    sinks: fx.Node | None = None  # that broadcasts to (B, H, L, 1): one more score of each head, without a value
    added: Added = field(default_factory=Added)  # what is added to the scores: a bias
    of_torch: bool = False  # whether it is a call of torch's function, with tensors of four dimensions
    grouped: bool = False  # whether k and v have fewer heads than q, each for a group of its heads

    @property
    def operands(self) -> tuple[fx.Node, fx.Node, fx.Node]:
        """q, k and v."""
        return self.q, self.k, self.v

    @property
    def known_scale(self) -> float:
        """What the scores are multiplied by, where the width is a number."""
        return float(self.q.meta["example_value"].shape[-1] ** -0.5 if self.scale is None else self.scale)


@dataclass
class Proof:
    """What its mask is proven to be."""

    mask: Mask | None = None
    # Where two masks are added up, what a query that attends to no key attends to: what one of them hides alone.
    alone: tuple[Expr, ...] = ()
    learns: tuple[Expr, ...] = ()  # of these keys, those to whose scores the number is added
    leaves: dict[str, fx.Node] = field(default_factory=dict)  # the tensors that it reads, by their functions' names
    readers: dict[str, fx.Node] = field(default_factory=dict)  # of those that the graph writes: when they are read


@dataclass
class Attention:
    """A place that computes attention, what its mask is, and how it is to run."""

    call: AttentionCall
    fqn: str
    proof: Proof = field(default_factory=Proof)
    by_hand: bool = False
    chosen: bool = False  # whether the user has chosen torch's backend for it
    # Whether k and v go on behind the last key that is attended to, as many as there are queries.
    ends_early: bool = False
    keeps_strides: bool = False  # whether something counts on the strides that its output was traced with
    is_written: bool = False  # whether the graph writes its output in place
    kernel: str = (
        "as_written"  # "as_written", "plain", "causal", "flex", "either", "kept", "fixed" or "few": see `KERNELS`
    )
    views: list[fx.Node] = field(default_factory=list)  # of its operands, put into the graph to be read
    refusal: Refusal | None = None  # why the mask stays a tensor

    @property
    def attends_to_all(self) -> bool:
        """Whether a query that attends to no key attends to all of them alike, or to `alone`, and there may be one."""
        mask = self.proof.mask
        return mask is not None and mask.smallest and self.call.sinks is None and not mask.nowhere_empty()

    @property
    def is_changed(self) -> bool:
        return self.kernel != "as_written"


KERNELS = {
    "as_written": "sdpa",
    "plain": "sdpa",
    "causal": "sdpa, is_causal",
    "flex": "flex_attention",
    "kept": "flash_attention to the keys that a padding keeps",
    "fixed": "sums in one order",
    "few": "few queries, which read the keys of their heads once",
    "either": "sdpa where the mask hides nothing, else flex_attention",
}
