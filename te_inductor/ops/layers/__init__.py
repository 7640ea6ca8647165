"""Linear layers, made of the other ops. `layer.py` has what all have in common, and `LayerSpec`; `dense.py` and
`experts.py` the two forms of products; `parts.py` the protocols that a layer is composed of, with their plain cases.

| part | other cases |
|---|---|
| `Operand` | `operands.py`; and weights that are `GatheredWeight` |
| `ScaleSource` | `delayed_scales.py` |
| `GradientSink` | `sinks.py`, `unrounded.py` |

`call.py` defines the op."""
