"""Launches kernels by a driver that has no device (fake_driver.c), and compares what it is given with what Triton gives it:

    python -m tests.offline.driver_launches FOLDER        # which holds the driver, libcuda.so.1
    python -m tests.offline.driver_launches FOLDER --times

Kernels are compiled for sm_90. With `--times`, the host's microseconds of each call, the driver's own apart."""

import ctypes
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia

from te_inductor.kernels.nvfp4_fp8 import NVFP4PromptConfig
from te_inductor.kernels.nvfp4_linear import NVFP4Config
from te_inductor.recipes import DelayedScaling, Gemm, Quantizer
from te_inductor.recipes.delayed import ScaleUpdate
from te_inductor.templates.triton import (
    experts_rows,
    grouped_casts,
    grouped_mm,
    nvfp4_fp8,
    nvfp4_linear,
    scale_updates,
)
from te_inductor.templates.triton.launcher import Launcher

FP8, BF16, FP32, INT32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int32
SIZES = {"i1": 1, "i32": 4, "i64": 8, "fp32": 4, "u64": 8}  # bytes of arguments, beside pointers
E, M, N, K = 4, 512, 256, 512


def empty(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def grouped_products() -> None:
    row = Gemm("fprop", scopes=("row", "row"))
    a, b, out = empty(M, K, dtype=FP8), empty(E, N, K, dtype=FP8), empty(M, N, dtype=BF16)
    ends, bias = empty(E, dtype=INT32), empty(E, N, dtype=BF16)
    grouped_mm.prepared(a, empty(), b, empty(E), ends, None, out, Gemm("fprop"), programs=132).launch()
    grouped_mm.prepared(a, empty(M, 1), b, empty(E, N), ends, bias, out, row, programs=132).launch()


def grouped_wgrads() -> None:
    blocks = Gemm("wgrad", False, ("1x128", "1x128"))
    a, b, starts = empty(N, M, dtype=FP8), empty(K, M, dtype=FP8), empty(E + 1, dtype=INT32)
    out, scales = empty(E, N, K), (empty(M // 128 * N), empty(M // 128 * K))
    grouped_mm.prepared_wgrad(a, empty(), b, empty(), starts, out, Gemm("wgrad"), True, programs=132).launch()
    grouped_mm.prepared_wgrad(a, scales[0], b, scales[1], starts, out, blocks, False, programs=132).launch()


def casts() -> None:
    w = empty(E, N, K, dtype=BF16)
    grouped_casts.transpose_experts(w, empty(), Quantizer("e4m3"))
    grouped_casts.transpose_groups(empty(M, K, dtype=FP8), empty(M, dtype=INT32))
    experts_rows.quantize_experts_rows(w, Quantizer("e4m3", scope="row"))


def stored_products() -> None:
    stored, scales = empty(N, K // 2, dtype=torch.uint8), empty(N, K // 16, dtype=FP8)
    streamed = NVFP4Config("streamed", 16, 128, 128, splits=1, warps=8, shares=1, stages=4)
    nvfp4_linear.partial_sums(empty(16, K, dtype=BF16), stored, scales, empty(), streamed, BF16)
    given = empty(M, K, dtype=FP8), empty(M, 1), stored, scales, empty()
    nvfp4_fp8.partial_sums(*given, NVFP4PromptConfig(128, 1), BF16)


def updates() -> None:
    update, misfits = ScaleUpdate(DelayedScaling(), "e4m3"), empty(5, scale_updates.COUNTS, dtype=INT32)
    scale_updates.launch(empty(), empty(5, dtype=torch.int64), update, misfits)
    scale_updates.launch_read(empty(1025), empty(5, dtype=torch.int64))


CALLS: tuple[Callable[[], None], ...] = (grouped_products, grouped_wgrads, casts, stored_products, updates)


class Driver:
    """The fake driver, as Triton's active one; launches are on device 0 and stream 7."""

    def __init__(self, folder: str) -> None:
        self.library = ctypes.CDLL(str(Path(folder, "libcuda.so.1")), mode=ctypes.RTLD_GLOBAL)
        self.library.fake_last.restype = ctypes.c_size_t
        self.library.fake_launches.restype = ctypes.c_ulonglong
        os.environ["TRITON_LIBCUDA_PATH"] = folder
        triton.runtime.driver._active = SimpleNamespace(  # type: ignore[attr-defined]
            utils=nvidia.CudaUtils(),
            launcher_cls=nvidia.CudaLauncher,
            map_python_to_cpp_type=nvidia.ty_to_cpp,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 7,
        )

    def expect_nothing(self) -> None:
        self.library.fake_expect(0, None)

    def expect(self, kernel: Any) -> None:
        """Has the arguments of a kernel noted, and the two places in memory that Triton adds."""
        sizes: list[int] = []
        for kind in kernel.src.signature.values():
            if kind.startswith("tensordesc"):
                sizes += 128, 4, 4, 8, 8
            elif kind != "constexpr":
                sizes.append(8 if kind[0] == "*" else SIZES[kind])
        sizes += 8, 8
        self.library.fake_expect(len(sizes), (ctypes.c_size_t * len(sizes))(*sizes))

    def last(self) -> tuple[list[int], bytes]:
        config, arguments = (ctypes.c_ulonglong * 7)(), ctypes.create_string_buffer(1 << 16)
        used = self.library.fake_last(config, arguments)
        return list(config), arguments.raw[:used]


def compare(driver: Driver) -> None:
    """Each launch three times: by Triton, by the launcher, and by it with the tensors of another call before."""
    seen: list[str] = []

    def launch(self: Launcher, programs: int, *arguments: Any, on: Any = None) -> None:
        driver.expect_nothing()
        kernel = self._by_triton(programs, arguments)
        driver.expect(kernel)
        self._by_triton(programs, arguments)
        expected = driver.last()
        assert len(expected[1]) > 16 and expected[0][4] == 7
        self._launch(programs, arguments, 0)
        with mock.patch.object(Launcher, "_by_triton", None):  # is not called again
            for _ in range(2):
                before = driver.library.fake_launches()
                self._launch(programs, arguments, 0)
                assert driver.last() == expected, self._kernel.__name__
                assert driver.library.fake_launches() == before + 1
        seen.append(self._kernel.__name__)

    with mock.patch.object(Launcher, "__call__", launch):
        for _ in range(2):
            kept = []  # so that other tensors have other addresses
            for call in CALLS:
                call()
                kept.append(empty(M, N))
    print(*seen)


def times() -> None:
    """Prints the host's time of each call, the least of many."""

    def launch(self: Launcher, programs: int, *arguments: Any, on: Any = None) -> None:
        self._launch(programs, arguments, 0)
        least = [float("inf"), float("inf")]
        for place, run in enumerate((self._launch, lambda p, a, _: self._by_triton(p, a))):
            for _ in range(1000):
                start = time.perf_counter()
                for _ in range(5):
                    run(programs, arguments, 0)
                least[place] = min(least[place], (time.perf_counter() - start) / 5 * 1e6)
        print(f"{self._kernel.__name__}: {least[0]:.1f} us, by Triton {least[1]:.1f}")

    with mock.patch.object(Launcher, "__call__", launch):
        for call in CALLS:
            call()


def main(folder: str, *options: str) -> None:
    driver = Driver(folder)
    is_cuda = mock.patch.object(Tensor, "is_cuda", True)
    stream = mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, create=True)
    with is_cuda, stream:
        if "--times" in options:
            times()
        else:
            compare(driver)


if __name__ == "__main__":
    main(*sys.argv[1:])
