"""`te-inductor doctor`: versions, the device, how each recipe runs on it, and what is broken. To be pasted into an
issue."""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import te_inductor
from te_inductor import config, targets
from te_inductor.kernels import cutlass_packages
from te_inductor.kernels import cutlass_tables as tables
from te_inductor.presentation.tables import Column, tabulated
from te_inductor.recipes import NAMES

OK, NOTE, BROKEN = "ok", "note", "BROKEN"
_SIZE = 4096  # of the layer that recipes are asked about: large enough for the size rule
_PACKAGES = (
    "triton",
    "numpy",
    "rich",
    "matplotlib",
    "safetensors",
    "transformers",
    "nvidia-cutlass-dsl",
    "quack-kernels",
)


class Check(NamedTuple):
    """One line."""

    name: str
    state: str
    found: str


def run(arguments: argparse.Namespace) -> int:
    """Print it; 1 where something is broken."""
    checks, device = [*_checks()], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recipes = [(name, *_recipe(name, device)) for name in NAMES if name not in ("auto", "none")]
    if arguments.compile:
        checks.append(_guarded("compile", lambda: _compile(device)))
    broken = [check.name for check in checks if check.state == BROKEN]
    broken += [f"recipe {name}" for name, runs, _ in recipes if runs == BROKEN]
    if arguments.json:
        data = {
            "checks": [check._asdict() for check in checks],
            "recipes": [dict(zip(("recipe", "runs", "why"), row, strict=True)) for row in recipes],
            "broken": broken,
        }
        print(json.dumps(data, indent=1))
        return int(bool(broken))
    print(tabulated((Column("", whole=True), Column("", whole=True), Column("found")), checks))
    print()
    columns = Column("recipe", whole=True), Column("runs"), Column("why")
    print(tabulated(columns, recipes))
    print()
    print(f"broken: {', '.join(broken)}" if broken else "nothing is broken")
    return int(bool(broken))


def _checks() -> Iterator[Check]:
    yield Check("te_inductor", OK, f"{te_inductor.__version__} in {Path(te_inductor.__file__).parent}")
    yield Check("python", OK, f"{platform.python_version()}, {platform.platform()}")
    yield Check("torch", OK, f"{torch.__version__}, CUDA {targets.cuda_version() or 'none'}")
    versions = [f"{name} {version}" for name in _PACKAGES if (version := _version(name)) is not None]
    yield Check("packages", OK, ", ".join(versions) or "none")
    for name, check in (
        ("cache folder", _cache),  # first, as torch cannot be imported whole without one
        ("backend", _backend),
        ("device", _device),
        ("triton", _triton),
        ("CUTLASS", _cutlass),
        ("GEMM table", _table),
        ("C++ compiler", _compiler),
        ("environment", _environment),
    ):
        yield _guarded(name, check)


def _guarded(name: str, check: Callable[[], tuple[str, str]]) -> Check:
    try:
        return Check(name, *check())
    except Exception as error:  # which is what the doctor is asked about
        return Check(name, BROKEN, f"{type(error).__name__}: {error}".splitlines()[0])


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _backend() -> tuple[str, str]:
    found = [one for one in metadata.entry_points(group="torch_dynamo_backends") if one.name == "te"]
    if not found:
        return BROKEN, 'torch does not know the name "te", as te_inductor is not installed here; pip install it'
    spec = importlib.util.find_spec(found[0].value.partition(":")[0])
    home = None if spec is None or spec.origin is None else Path(spec.origin).parent
    if home != Path(te_inductor.__file__).parent:
        return BROKEN, f'"te" is of another installation, in {home}'
    return OK, f'"te" is {found[0].value}'


def _device() -> tuple[str, str]:
    if not torch.cuda.is_available():
        what = "torch is built without CUDA" if targets.cuda_version() is None else "torch finds no GPU"
        return (NOTE, f"CPU, {torch.get_num_threads()} threads; {what}")
    names = [targets.described(torch.device("cuda", place)) for place in range(torch.cuda.device_count())]
    refusal = targets.of(torch.device("cuda")).refusal
    return (OK, "; ".join(names)) if refusal is None else (NOTE, f"{'; '.join(names)}: {refusal}")


def _triton() -> tuple[str, str]:
    version = _version("triton")
    if version is None:
        return (BROKEN if torch.cuda.is_available() else NOTE), "not installed; a GPU needs it"
    import triton

    return OK, f"{triton.__version__}"


def _cutlass() -> tuple[str, str]:
    why = cutlass_packages.missing()
    return (OK, "its kernels can be built") if why is None else (NOTE, f"not used: {why}")


def _table() -> tuple[str, str]:
    """Reports the table by which a CUTLASS kernel is taken in place of cuBLASLt's."""
    tables.check()  # the user's, whatever they are of
    if not torch.cuda.is_available():
        return NOTE, f"none, as there is no GPU{_folder_of_tables()}"
    device = torch.device("cuda")
    name = targets.product(device)
    can_tune = targets.of(device).cutlass == "90" and cutlass_packages.missing() is None
    table = tables.of(name)
    if table is not None:
        place = f"{table.path}" if table.is_users else "the package"
        why = "" if can_tune else "; not used: CUTLASS's kernels do not run here"
        return OK if can_tune else NOTE, f"{len(table.rows)} GEMMs on {name}, {table.dates}, of {place}{why}"
    remedy = "; `te-inductor tune` measures it in minutes" if can_tune else ""
    return NOTE, f"none of {name}, cuBLASLt multiplies{_folder_of_tables()}{remedy}"


def _folder_of_tables() -> str:
    folder = config.tables()
    return "" if folder is None else f", {config.TABLES} is {folder}"


def _cache() -> tuple[str, str]:
    try:
        folder = Path(_cache_folder())
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"1")
    except OSError as error:
        os.environ[_CACHE] = tempfile.mkdtemp()  # for the checks to come
        return BROKEN, f"{error}; give {_CACHE} a folder that can be written"
    free = shutil.disk_usage(folder).free / 2**30
    return (OK if free > 1 else NOTE), f"{folder}, can be written, {free:.0f} GiB free"


_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def _cache_folder() -> str:
    if os.environ.get(_CACHE):
        return os.environ[_CACHE]
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def _compiler() -> tuple[str, str]:
    from torch._inductor.cpp_builder import get_cpp_compiler

    compiler = get_cpp_compiler()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "one.cpp")
        source.write_text("#include <cmath>\nint main() { return std::isnan(0.0); }\n")
        command = [compiler, "-O1", str(source), "-o", str(Path(folder, "one"))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return BROKEN, f"{compiler} compiles no program: {(done.stderr.strip().splitlines() or ['?'])[0]}"
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    return OK, f"{compiler}: {(version.splitlines() or ['?'])[0]}"


def _environment() -> tuple[str, str]:
    from te_inductor.passes.pre_grad.decide.policy import Policy
    from te_inductor.recipes import resolve

    options = config.parse()
    resolve(options.recipe, options.recipe_called("recipe"))
    Policy(options.policy, options.recipe_called("policy"))
    if wrong := config.unknown_variables():
        return BROKEN, "; ".join(wrong)
    names = sorted(name for name in os.environ if name.startswith(("TE_INDUCTOR_", "TORCHINDUCTOR_", "TORCH_LOGS")))
    return OK, ", ".join(f"{name}={os.environ[name]}" for name in names) or "none of its variables is set"


def _recipe(name: str, device: torch.device) -> tuple[str, str]:
    """How it runs, and why: what `explain` says of a layer."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _explained(name, device)
    except Exception as error:  # which is what the doctor is asked about
        return BROKEN, f"{type(error).__name__}: {error}".splitlines()[0]


def _explained(name: str, device: torch.device) -> tuple[str, str]:
    stored = name == "nvfp4_weight_only"
    size = 128 if device.type == "cpu" else _SIZE
    torch._dynamo.reset()
    layer = nn.Sequential(nn.Linear(size, size, bias=False, device=device, dtype=torch.bfloat16))
    if stored:
        te_inductor.quantize_(layer, name)
    x = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    with torch.set_grad_enabled(not stored):
        report = te_inductor.explain(layer, x, options={"policy": {"0": name}, "fallback": "silent"})
    if report.failure is not None:
        return BROKEN, report.failure.strip().splitlines()[-1]
    kernels = ", ".join(dict.fromkeys(site.kernel for site in report.sites))
    reason = next((site.reason for site in report.sites if site.reason), "")
    if "high_precision" in kernels:
        return "refused", reason
    if device.type == "cpu":
        return "emulated", reason or "a CPU has no FP8 GEMM: the format's values, multiplied in fp32"
    return ("emulated" if reason else f"native: {kernels}"), reason


def _compile(device: torch.device) -> tuple[str, str]:
    layer, x = nn.Linear(64, 64, device=device), torch.randn(64, 64, dtype=torch.get_default_dtype(), device=device)
    options: dict[str, Any] = {"policy": {"*": "current"}, "fallback": "error"}
    compiled = torch.compile(layer, backend=te_inductor.te, options=options)
    expected, y = layer(x), compiled(x)
    y.sum().backward()
    error = ((y - expected).norm() / expected.norm()).item()
    return (OK if 0 < error < 0.1 else BROKEN), f"a layer compiles and runs; it is {error:.1%} from high precision"
