"""Products with matrices that are picked from a stored weight of experts."""

from typing import ClassVar

from torch import fx

from te_inductor.ops.stored_experts import PickedExperts
from te_inductor.passes.graph import operators
from te_inductor.passes.graph.operators import Call
from te_inductor.passes.graph.owners import from_parameter
from te_inductor.passes.graph.values import is_tensor, value
from te_inductor.passes.pre_grad.sites.groups import Groups
from te_inductor.passes.pre_grad.sites.rule import Match, Rule


class Picked(Rule):
    """``torch.bmm(p[ids], x)``, also the other way round, with stored weights of experts: for the report, as the
    product finds its kernel by itself."""

    pattern: ClassVar[str] = "grouped_linear"

    def match(self, node: fx.Node) -> Match | None:
        call = Call.read(node)
        if call is None or call.name not in ("bmm", "matmul") or len(call.operands) != 2:
            return None
        first, second = call.operands.values()
        for picked, x in ((first, second), (second, first)):
            if is_tensor(picked) and isinstance(value(picked), PickedExperts) and is_tensor(x):
                break
        else:
            return None
        transposed = picked is second
        while operators.read(picked).name not in ("getitem", "index", "index_select"):
            transposed ^= bool(operators.swaps(picked))
            picked = picked.args[0]
        numbers = [one for one in picked.all_input_nodes if one is not picked.args[0]]
        if not from_parameter(picked.args[0]) or len(numbers) != 1:
            return None
        weight = picked.args[0]
        return Match(node, x, weight, transposed=transposed, parts=(Groups(numbers[0], numbered=True),))
