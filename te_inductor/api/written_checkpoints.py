"""`quantized_state_dict`: stored weights as the plain tensors of a published checkpoint, which any file format can hold."""

from torch import Tensor, nn

from te_inductor.api.checkpoint_formats import BLOCKS, FORMATS, NVFP4, ROWS, TENSOR, CheckpointFormat
from te_inductor.errors import OptionError, StoredWeightError, wrong_type
from te_inductor.ops.stored_experts import StoredExperts
from te_inductor.ops.stored_weight import Float8Weight, NVFP4Weight, StoredWeight
from te_inductor.recipes import Recipe

# The format that a kind of stored weights is written in, by the suffixes of its keys, as one recipe has several.
# ModelOpt's NVFP4, because its scale of the tensor is ours, and compressed-tensors' is the reciprocal.
_SUFFIXES = {
    TENSOR: ("", "_scale"),
    ROWS: ("", "_scale"),
    BLOCKS: ("", "_scale_inv"),
    NVFP4: ("", "_scale", "_scale_2"),
}
_WRITTEN: dict[type[Recipe], CheckpointFormat] = {
    type(one.recipe): one for one in FORMATS if tuple(part.suffix for part in one.parts) == _SUFFIXES[one.recipe]
}


def quantized_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The model's state_dict, in which each stored weight is the tensors that a published checkpoint has for it.

    Returns:
        plain tensors, for safetensors' `save_file`, or for ``model.save_pretrained(folder, state_dict=…)`` of
        transformers. `te_inductor.load_quantized` makes the same stored weights of them, bit for bit. A weight (N, K) is:

        - "current": ``weight`` e4m3, ``weight_scale`` ()
        - "rowwise": ``weight`` e4m3, ``weight_scale`` (N, 1)
        - "block": ``weight`` e4m3, ``weight_scale_inv`` (N/128, K/128)
        - "nvfp4_weight_only": ``weight`` uint8 (N, K/2), ``weight_scale`` e4m3 (N, K/16), ``weight_scale_2`` ()

    A checkpoint does not say how activations are cast: where a weight's recipe is not what `load_quantized` takes for its
    format, give that one's `recipes` the recipe. A weight with several names is written under the first.

    Raises:
        OptionError: `model` is no module.
        StoredWeightError: stored experts, or NVFP4 with K no multiple of 16, which no format has.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(wrong_type("quantized_state_dict's model", model, "an nn.Module"))
    found: dict[str, Tensor] = {}
    written: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, StoredWeight | StoredExperts):
            found[name] = tensor.detach() if isinstance(tensor, Tensor) else tensor
        elif id(tensor) not in written:
            written.add(id(tensor))
            found |= _written(name, tensor)
    return found


def _written(name: str, weight: Tensor) -> dict[str, Tensor]:
    if not isinstance(weight, Float8Weight | NVFP4Weight):
        raise StoredWeightError(
            f"{name} is {weight!r}, expected the weight of a linear layer, as no published format has experts in one"
            " tensor; torch.save(model.state_dict()) keeps them"
        )
    n, k = weight.shape
    of = _WRITTEN[type(weight.recipe)]
    shapes = [part.shapes(n, k)[:1] for part in of.parts]
    if not all(shapes):
        raise StoredWeightError(
            f"{name} is {weight!r}, expected K to be a multiple of 16, as checkpoints in NVFP4 have it;"
            " torch.save(model.state_dict()) keeps it"
        )
    first, *scales = weight.saved()
    columns = shapes[0][0][1]
    parts = (first[:, :columns], *scales)
    return {
        key: part.detach().reshape(shape).contiguous()
        for key, part, [shape] in zip(of.keys(name), parts, shapes, strict=True)
    }
