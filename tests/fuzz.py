"""Small random models, programs around them, and the check of one: compiled against the eager reference, bit for bit;
code that Inductor generated, whose roundings differ, up to the noise of the formats.

A case is plain data, so that a failure prints what builds it again: `check(Case(...))` in a test of its own.
"""

import contextvars
import copy
import threading
import warnings
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from te_inductor import Report, autocast, backward_dw, explain, load_state_dict, state_dict
from te_inductor.recipes import Recipe
from te_inductor.recipes.regions import active
from tests.eager import quantized_as
from tests.experts import FixedExperts
from tests.support.random_models import DTYPES, MODES, VARIANTS, Broken, Case, Step, plain, recipe_of, sequence


def check(case: Case, generated: bool = False) -> None:
    """Compiled and eager results of a case agree, bit for bit, or, where code was generated, up to the formats' noise,
    and no pass of ours failed."""
    torch._dynamo.reset()
    torch.manual_seed(case.seed)
    dtype = DTYPES[case.dtype]
    # AOTAutograd, of an output in another layout, lays out the gradient anew, and BLAS may then add in another order.
    model = _model(case).append(Step(lambda _, y: y.contiguous())).to(dtype)
    x = torch.randn(*case.leading, case.width).to(dtype).requires_grad_(case.x_grad and case.mode == "train")
    for place, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(not case.frozen or place % case.frozen != 0)
    _with_totals(model, case)
    policy = {glob: recipe_of(name) for glob, name in case.policy}
    options = {"recipe": recipe_of(case.recipe), "policy": policy, "weights": case.weights, "wgrad": case.wgrad}
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="(?s).*because a pass of ours failed")
        stack.enter_context(torch._dynamo.config.patch(assume_static_by_default=not case.dynamic))
        stack.enter_context(set_checkpoint_early_stop(False))
        # torch refuses retain_graph otherwise.
        functorch = {"donated_buffer": case.backwards == 1, "activation_memory_budget": case.budget}
        stack.enter_context(torch._functorch.config.patch(functorch))
        stack.enter_context(MODES[case.mode]())
        if case.around is not None:
            stack.enter_context(_around(case.around))
        report = explain(model, x, options=options)
        in_parts = case.breaks and "written" in repr(case.steps)
        if in_parts or all(site.kernel == "high_precision" for site in report.sites):
            # Plain Inductor, which compiles graphs without a layer in low precision, computes again what reads a
            # parameter that was written since (pytorch/pytorch#190758).
            stack.enter_context(torch._functorch.config.patch(activation_memory_budget=1.0))
        recipes = _recipes(model, x, case)
        assert {site.fqn: site.recipe for site in report.sites} == {fqn: plain(name) for fqn, name in recipes.items()}
        instances = {fqn: recipe for fqn, name in recipes.items() if isinstance(recipe := recipe_of(name), Recipe)}
        eager = quantized_as(report, model, instances)
        twins = [_with_totals(copy.deepcopy(model), case) for _ in range(case.threads)]
        torch._dynamo.reset()
        compile = partial(torch.compile, backend="te", fullgraph=not case.breaks, options=options)
        compiled = compile(model)
        # The reference of delayed scaling is the first step.
        first = any(site.recipe == "delayed" for site in report.sites)
        # Autograd sees in AOTAutograd's eager graphs, and not in Inductor's, that a backward changes totals and
        # tickets.
        backwards = 1 if first or (case.wgrad != "grad" and not generated) else case.backwards
        expected = _results(eager, x, backwards)
        _compare(expected, _results(compiled, x, backwards), case, report, generated)
        if case.threads > 1:
            for found in _at_once([compile(twin) for twin in twins], x, case, backwards):
                _compare(expected, found, case, report, generated)
        if case.copies:
            twin = _with_totals(copy.deepcopy(model), case)
            load_state_dict(twin, state_dict(model))
            _same(_results(compiled, x, backwards), _results(compile(twin), x, backwards))
            _same(state_dict(model), state_dict(twin))
        if case.weights == "once" and not first:
            if case.copies:  # which have changed what their forward writes once more
                eager.load_state_dict(dict(zip(eager.state_dict(), model.state_dict().values(), strict=True)))
            _change(eager), _change(model)
            _compare(_results(eager, x, backwards), _results(compiled, x, backwards), case, report, generated)


def _model(case: Case) -> Broken:
    model = Broken(*sequence(case.steps, case.width)[0])
    model.breaks = min(case.breaks, len(model) - 1)
    return model


def _with_totals(model: nn.Module, case: Case) -> nn.Module:
    for parameter in model.parameters():
        if case.wgrad == "main_grad" and parameter.dim() == 2:
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    return model


def _at_once(runs: list, x: Tensor, case: Case, backwards: int) -> list[dict[str, Tensor]]:
    """What calls in threads of their own give, each of its own model and its own x."""
    start, found, failures = threading.Barrier(len(runs)), [{} for _ in runs], []

    def call(place: int) -> None:
        try:
            with MODES[case.mode]():  # of a thread
                start.wait()
                mine = x.detach().clone().requires_grad_(x.requires_grad)
                found[place] |= _results(runs[place], mine, backwards)
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(call, place)) for place in range(len(runs))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return found


def _same(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value.nan_to_num(), found[name].nan_to_num()), name


def _change(model: nn.Module) -> None:
    """Changes weights as an optimizer may: without a trace in version counters."""
    for parameter in model.parameters():
        parameter.data.mul_(0.75)
        parameter.grad = None


def _compare(
    expected: dict[str, Tensor], found: dict[str, Tensor], case: Case, report: Report, generated: bool
) -> None:
    # Autograd adds the gradients of a layer's two uses in the parameter's dtype, main_grad in fp32.
    added = case.wgrad == "main_grad" and case.dtype != "float32" and "twice" in repr(case.steps)
    slack = 4 * _eps(case) if added else 0.0
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        wide, other = value.float(), found[name].float()
        if generated:
            noise, largest = (wide - other).norm(), wide.norm()
            assert noise <= _noise(report, case) * largest, f"{name}: {noise} of {largest}"
        else:
            difference, largest = (wide - other).abs().max(), wide.abs().max()
            assert difference <= slack * largest, f"{name}: {difference} of {largest}"


def _eps(case: Case) -> float:
    """The epsilon of what layers in high precision round to; under torch.autocast it is bf16, whatever the model is."""
    return torch.finfo(torch.bfloat16 if "amp" in repr(case.steps) else DTYPES[case.dtype]).eps


def _noise(report: Report, case: Case) -> float:
    """How far two runs may be apart whose roundings are independent: each low-precision layer adds that of its
    operands, by half a step of the narrowest element, and the rest rounds to the dtype; where a bias's gradient
    cancels, plain Inductor was 6e-5 off eager fp32 code."""
    steps = {"nvfp4": 2.0**-2, "mxfp4": 2.0**-2, "none": 0.0}
    layers = sum(steps.get(site.recipe, 2.0**-3) for site in report.sites if site.kernel != "high_precision")
    return layers + 2.0**-10 + 64 * _eps(case)


def _recipes(model: nn.Module, x: Tensor, case: Case) -> dict[str, str]:
    """The recipe of each layer, by what is in force when it is called: a disabled region, a policy entry, the region,
    the default."""
    found = {}

    def record(path: str):
        def hook(module: nn.Module, inputs: tuple) -> None:
            names = [f"{path}.weight", path] if isinstance(module, FixedExperts) else [path]
            named = [name for glob, name in case.policy if any(fnmatchcase(each, glob) for each in names)]
            region = active()
            of_region = _name_of(region.recipe) if region.recipe else case.recipe
            found[names[0]] = (named[0] if named else of_region) if region.enabled else "none"

        return hook

    layers = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.Linear | FixedExperts)]
    hooks = [module.register_forward_pre_hook(record(path)) for path, module in layers]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    return found


def _name_of(recipe: Recipe) -> str:
    """The name that cases have for the recipe."""
    return next((name for name, other in VARIANTS.items() if other == recipe), recipe.name)


def _around(name: str) -> autocast:
    return autocast(enabled=name != "none", recipe=None if name == "none" else recipe_of(name))


def _results(run, x: Tensor, backwards: int) -> dict[str, Tensor]:
    """The output, and in training the gradients of all that has one, in order."""
    torch.manual_seed(0)
    y = run(x)
    found = {"y": y.detach()}
    wanted = [tensor for tensor in (x, *run.parameters()) if tensor.requires_grad]
    if y.requires_grad:
        loss = (y.float() * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum()
        for left in reversed(range(backwards)):
            loss.backward(retain_graph=left > 0)
        backward_dw(run)
        gradients = map(_gradient, wanted)
        found |= {f"gradient {i}": g for i, g in enumerate(gradients) if g is not None}
        x.grad = None
    return found


def _gradient(tensor: Tensor) -> Tensor | None:
    """What a backward left, where `grad` and `main_grad` were empty; they are again."""
    total, grad = getattr(tensor, "main_grad", None), tensor.grad
    if grad is None and total is not None:
        grad = total.to(tensor.dtype, copy=True)
        total.zero_()
    tensor.grad = None
    return grad
