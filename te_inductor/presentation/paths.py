"""Module paths as the model's author knows them, without what adapters and data parallelism add."""

import re

# What peft puts around a model, and in a layer's place around the layer.
_ADAPTED = re.compile(r"^base_model\.model(\.|$)|(^|\.)base_layer(?=\.|$)")
_DDP = re.compile(r"^module\.")


def plain(path: str) -> str:
    """A path without what peft adds to it: that of the layer in the model as it was before."""
    return _ADAPTED.sub("", path).strip(".")


def names_of(path: str) -> tuple[str, ...]:
    """The names by which a glob may name a layer, the plain path first: as in the model, as in the adapted model, and
    as inside of a DistributedDataParallel."""
    inner = _DDP.sub("", path)
    return tuple(dict.fromkeys((plain(path), path, plain(inner), inner)))
