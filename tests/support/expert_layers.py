"""Experts as models write them, compiled and run eagerly."""

import torch
from torch import nn

from te_inductor import explain
from tests.experts import EACH, HIDDEN, TOKENS, MoE, grouped_mm
from tests.support import autograd

ROUTER = {"*gate": "none"}


PATHS = ["experts.gate_up_proj", "experts.down_proj"]


def te(model, name, **options):
    return autograd.te(model, name, **{"policy": ROUTER, **options})


def tokens(count=TOKENS, dtype=torch.float32):
    return torch.randn(count, HIDDEN, dtype=dtype, requires_grad=True)


def results(run, model, x):
    y = run(x)
    wanted = [tensor for tensor in (x, *model.parameters()) if tensor.requires_grad]
    torch.manual_seed(1)
    return [y.detach(), *torch.autograd.grad(y, wanted, torch.randn_like(y))]


class Biased(MoE):
    """Experts as gpt-oss's: each row is given the bias of its expert behind the product."""

    def __init__(self, add: str) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4, 32))
        self.add = add
        self.experts = nn.ParameterDict({"w": torch.randn(4, HIDDEN, 32) / HIDDEN**0.5})

    def forward(self, x):
        scores, ids = self.gate(x).softmax(-1).topk(EACH, dim=-1)
        ids, order = torch.sort(ids.flatten(), descending=self.add == "descending")
        counted = ids.clamp(max=2) if self.add == "others counted" else ids
        counts = torch.histc(counted.float(), bins=4, min=0, max=3)
        y = grouped_mm(x[order // EACH], self.experts["w"], counts.cumsum(0, dtype=torch.int32))
        if self.add == "in place":
            y.add_(self.bias[ids])
        elif self.add == "augmented":
            y += self.bias[ids]
        elif self.add == "read before":
            z = y * 2
            y = (y + self.bias[ids]) + z
        elif self.add == "ids written":
            ids.clamp_(max=2)
            y.add_(self.bias[ids])
        elif self.add == "scaled":
            y.add_(self.bias[ids], alpha=2)
        else:
            y = y + self.bias[ids]
        y = y * scores.flatten()[order][:, None]
        return y[torch.argsort(order)].view(-1, EACH, 32).sum(1)


def sites(model, *inputs, **options) -> dict[str, tuple]:
    """The sites by module path: recipe, kernel, how many are one GEMM, reason."""
    report = explain(model, *inputs, options={"recipe": "current", **options})
    assert report.failure is None, report.failure
    return {
        site.fqn: (site.recipe, site.kernel == "high_precision", len(site.merged), site.reason)
        for site in report.sites
        if site.gemm == "fprop"
    }
