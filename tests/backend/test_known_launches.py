"""Launches of Inductor's kernels that repeat what the first one found, as releases before 2.13 need it. There is no GPU:
what a kernel is launched by is noted, where torch's own launch and ours call it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.runtime import static_triton_launcher
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.select_algorithm import extern_kernels
from torch.utils._debug_mode import DebugMode

from te_inductor.lowerings.codegen import known_launches

SOURCE = "def launcher(a, b, c, size, stream):\n    return runner((size + 127) // 128, 1, 1, stream, a, b, c, size)"


class Static(static_triton_launcher.StaticallyLaunchedCudaKernel):
    """Torch's static kernel, without a cubin."""

    def __init__(self) -> None:
        self.function, self.module, self.num_warps, self.shared, self.arg_tys = 77, None, 8, 64, "OOOi"
        self.has_global_scratch, self.has_profile_scratch = True, True
        self.launched: list[tuple[Any, ...]] = []

    @property
    def C_impl(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(_launch_kernel=lambda *given: self.launched.append(given))


class Kernel(CachingAutotuner):
    """Torch's kernel behind its first launch, which says when it is called."""

    def __init__(self, static: Any, **more: Any) -> None:
        names: dict[str, Any] = {"runner": static.run}
        exec(SOURCE, names)
        launcher = names["launcher"]
        launcher.store_cubin, launcher.config = False, SimpleNamespace()
        self.launchers, self.inductor_meta, self.calls = [launcher], {}, 0
        self.dump_launch_params = self.dump_launch_tensors = False
        vars(self).update(more)

    def run(self, *args: Any, stream: int) -> None:  # type: ignore[override]
        self.calls += 1
        self.launchers[0](*args, stream=stream)


@pytest.fixture
def inputs(monkeypatch) -> list[Any]:
    monkeypatch.setattr(Tensor, "is_cuda", True)
    return [torch.empty(8), torch.nn.Parameter(torch.empty(8)), None, 300]


def known(**more: Any) -> tuple[known_launches.KnownKernel, Kernel, Static]:
    static = Static()
    kernel = Kernel(static, **more)
    return known_launches.KnownKernel(kernel), kernel, static


def test_later_launches_are_the_first_one(inputs):
    one, kernel, static = known()
    for _ in range(3):
        one.run(*inputs, stream=5)
    assert kernel.calls == 1
    [first, *later] = static.launched
    a, b, c, size, *scratch = first[7]
    given = (a.data_ptr(), b.data_ptr(), c, size, *scratch)
    assert later == [(*first[:7], given, *first[8:])] * 2
    assert first[:7] == (77, 3, 1, 1, 8, 64, "OOOiOO") and first[8] == 5


def test_who_looks_on_sees_each_launch(inputs):
    one, kernel, _ = known()
    one.run(*inputs, stream=5)
    with torch.autograd.profiler.profile():
        one.run(*inputs, stream=5)
    with DebugMode():
        one.run(*inputs, stream=5)
    one.run(*inputs, stream=5)
    assert kernel.calls == 3


@pytest.mark.parametrize(
    "more",
    [
        {"dump_launch_params": True},
        {"dump_launch_tensors": True},
        {"inductor_meta": {"coordinate_descent_tuning": True}},
    ],
)
def test_kernels_that_do_more_are_torchs(inputs, more):
    one, kernel, _ = known(**more)
    for _ in range(3):
        one.run(*inputs, stream=5)
    assert kernel.calls == 3


def test_a_tensor_of_another_device_is_torchs(inputs, monkeypatch):
    monkeypatch.setattr(Tensor, "is_cuda", False)
    one, kernel, _ = known()
    for _ in range(3):
        one.run(*inputs, stream=5)
    assert kernel.calls == 3


def test_a_kernel_that_tritons_launcher_launches_is_torchs(inputs):
    one, kernel, _ = known()
    names = kernel.launchers[0].__globals__
    names["runner"] = lambda *given: None
    for _ in range(3):
        one.run(*inputs, stream=5)
    assert kernel.calls == 3


def test_names_of_kernels_alone_are_replaced():
    kernel = object.__new__(CachingAutotuner)
    names = {"kernel": kernel, "other": 5, "one_of_a_subclass": known()[1]}
    before = dict(names)
    extern_kernels.te_inductor_know_launches(names)
    assert type(names.pop("kernel")) is known_launches.KnownKernel
    assert names == {name: one for name, one in before.items() if name != "kernel"}


def test_code_of_a_release_that_needs_it_asks_for_it(monkeypatch):
    """What generated code begins with."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.utils import IndentedBuffer
    from torch._inductor.virtualized import V

    monkeypatch.delattr(CachingAutotuner, "_build_fast_launcher", raising=False)
    wrapper: Any = SimpleNamespace(prefix=IndentedBuffer())
    with V.set_graph_handler(SimpleNamespace(cpp_wrapper=False)):  # type: ignore[arg-type]
        with known_launches.launches_known():
            PythonWrapperCodegen.write_async_compile_wait(wrapper)
        assert wrapper.prefix.getvalue().count("extern_kernels.te_inductor_know_launches(globals())") == 1
        PythonWrapperCodegen.write_async_compile_wait(wrapper)
        assert wrapper.prefix.getvalue().count("te_inductor_know_launches") == 1
