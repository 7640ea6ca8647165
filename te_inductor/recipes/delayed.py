"""DelayedScaling: the one recipe with state. Its scales follow from the amaxes of earlier steps."""

from collections.abc import Callable
from typing import Any, ClassVar

from te_inductor.errors import RecipeError, unknown, wrong_type
from te_inductor.recipes.constants import Constant, constant
from te_inductor.recipes.formats import ELEMENTS, Element, Format
from te_inductor.recipes.quantizers import MMParams, Quantizer
from te_inductor.recipes.recipe import ATTENTION, Recipe, Slots, refuse

AMAX_ALGORITHMS = ("max", "most_recent")


@constant
class DelayedScaling(Recipe):
    """FP8 with one scale a tensor, known before the tensor is: it follows from the largest amax of the last steps.

    A step casts with the scales known when its forward began, and records its own amaxes; forward scales are updated
    when the forward ends, gradient scales when the backward ends. Under `torch.no_grad` nothing is recorded or updated.
    A step in which some scale has no history yet casts by each tensor's own amax. State belongs to the weight's
    parameter; `te_inductor.state_dict` and `load_state_dict` carry it.

    Names, fields and defaults are TransformerEngine's. `amax_compute_algo` may be a function of the history,
    (amax_history_len, tensors) with this step's amaxes in row 0, that returns (tensors,) amaxes;
    `scaling_factor_compute_algo` a function of (amax, scale, fp8_max, recipe) that returns scales. Either is a plain
    function without a closure, so that its code can stand in the compile caches' keys. `reduce_amax` takes the maximum
    over the ranks that share the parameter, or over options["amax_group"], where all of them run graphs with the same
    quantizers.
    """

    name: ClassVar[str] = "delayed"

    margin: int = 0  # leaves 2**margin of headroom below the element's largest value
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[Any], Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(self, fp8_dpa=ATTENTION, fp8_mha=ATTENTION)
        if self.amax_history_len < 1:
            raise RecipeError(f"DelayedScaling.amax_history_len is {self.amax_history_len}, expected 1 or more")
        if not 0 <= self.margin <= 64:
            raise RecipeError(f"DelayedScaling.margin is {self.margin}, expected 0 to 64: a power of two of headroom")
        algorithm, scaling = self.amax_compute_algo, self.scaling_factor_compute_algo
        if not callable(algorithm) and algorithm not in AMAX_ALGORITHMS:
            raise RecipeError(unknown("DelayedScaling.amax_compute_algo", algorithm, AMAX_ALGORITHMS))
        if scaling is not None and not callable(scaling):
            raise RecipeError(wrong_type("DelayedScaling.scaling_factor_compute_algo", scaling, "a function or None"))
        if callable(algorithm) or callable(scaling):
            self.__fx_repr__()  # refuses functions that no cache key can stand for

    def slots(self) -> Slots:
        forward, backward = Quantizer(self.fp8_format.forward.name), Quantizer(self.fp8_format.backward.name)
        return Slots.of(forward, forward, backward, fprop=MMParams(use_split_accumulator=False))


def suitable(element: Element) -> tuple[float, float]:
    """The values between which a scale has to bring an amax: Note [Scales that do not suit] in
    runtime/state/misfits.py."""
    return 8 * 2.0**element.min_exponent, 2 * element.max


@constant
class ScaleUpdate(Constant):
    """How the recorded amaxes of quantizers with the same element become their next scales."""

    recipe: DelayedScaling
    element: str  # "e4m3" or "e5m2"
    groups: tuple[str, ...] = ()  # names of process groups, over which amaxes are reduced one after another
    agreement: str | None = None  # they are where all ranks agreed on it: `distributed/agreement.py`; None: always
    heals: bool = False  # whether outliers are kept out of histories: Note [A guard that heals]
    waits: bool = False  # whether amaxes wait for a later update, of this microbatch and others: Note [Microbatches]

    @property
    def format(self) -> Element:
        return ELEMENTS[self.element]

    @property
    def largest(self) -> float:
        """What the amax is scaled to."""
        return self.format.max / 2.0**self.recipe.margin

    @property
    def suitable(self) -> tuple[float, float]:
        return suitable(self.format)

    @property
    def outlying(self) -> float:
        """The value above which an amax that its scale brought there is an outlier."""
        return 16 * self.format.max
