"""What is computed of the logits of an output layer: the constants of cross entropy."""

import math

from te_inductor.recipes.constants import Constant, constant
from te_inductor.recipes.formats import E4M3, E5M2, Element
from te_inductor.recipes.quantizers import Gemm, Quantizer
from te_inductor.recipes.recipe import Slots

# How the operands of a loss's backward are cast where a recipe has other scales than one a tensor.
_WHOLE = Quantizer(E4M3.name)
_GRADIENT = Quantizer(E5M2.name)


@constant
class SharedWords(Constant):
    """A vocabulary of which each rank of a group has a part: as many words as the first rank, or what is left."""

    group: str  # name of the process group
    ranks: int  # its size
    words: int  # of all ranks

    @property
    def most(self) -> int:
        """How many words a rank has at most, which the first one has."""
        return -(-self.words // self.ranks)


@constant
class Loss(Constant):
    """Cross entropy of each token, of logits l that the model may scale and cap: z = `outer` tanh(`inner` l), or
    `inner` l where `outer` is None."""

    ignored: int | None = None  # the label of tokens that have no loss, and no gradient
    smoothing: float = 0.0  # the part of a label that is spread over the vocabulary
    inner: float = 1.0
    outer: float | None = None
    # Whether the logarithms of the softmax's sums are results too, without smoothing: then what is kept of the gradient
    # is that of a sum, but for the label's logit.
    sums: bool = False
    shared: SharedWords | None = None  # the words, where logits are of one rank's alone

    @property
    def bound(self) -> float:
        """What no gradient of a logit exceeds, where that of the loss is 1: dz/dl, since that of z is the difference of
        two probabilities."""
        return abs(self.inner * (1.0 if self.outer is None else self.outer))

    def gradient_scale(self, element: Element) -> float:
        """The scale with which such gradients are cast: those of labels, most of which are nearly the bound, become nearly
        a power of two, which a cast leaves as it is."""
        return float(2.0 ** math.floor(math.log2(element.max)) / self.bound)


def slots_of_loss(slots: Slots) -> Slots | None:
    """The slots of an output layer and its loss, of a layer's; None of formats whose GEMMs have no such backward.

    The forward is the recipe's own. The gradient of logits is E5M2 with one scale, which is known beforehand: most of it
    are probabilities of words that nobody expects, and the smallest that E4M3 holds with such a scale, 2**-17, is more
    than one in a vocabulary of 131072 words. So the other operands of the backward have one scale too."""
    if slots.fprop.microscaled or any(one.format.coded for one in (slots.input, slots.weight)):
        return None
    x, weight = column_quantizers(slots)
    same = slots.grad_output.granularity.whole and slots.grad_output.format is E5M2
    dy = slots.grad_output if same else _GRADIENT
    dgrad = Gemm.of("dgrad", dy, weight, slots.dgrad.fast_accum)
    return Slots(slots.input, slots.weight, dy, slots.fprop, dgrad, Gemm.of("wgrad", dy, x, slots.wgrad.fast_accum))


def column_quantizers(slots: Slots) -> tuple[Quantizer, Quantizer]:
    """How the backward's copies of x and of the weight are cast."""
    x, weight = (one if one.granularity.whole else _WHOLE for one in (slots.input, slots.weight))
    return x, weight
