"""The op set on real tensors, in plain torch: what runs when a graph runs uncompiled, and when a lowering cannot. The
signature of a function is the schema of its op."""

from typing import Annotated

from torch import Tensor

Written = Annotated[Tensor, "written"]  # an argument that the function writes, as its op's schema says
