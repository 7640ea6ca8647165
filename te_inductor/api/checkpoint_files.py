"""Checkpoints as they are found: folders of safetensors files, one such file, or a state_dict; read tensor by tensor."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from te_inductor.api.checkpoint_formats.protocol import TensorEntry
from te_inductor.errors import CheckpointError, wrong_type

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Checkpoint:
    """Keys with their dtypes and shapes, a configuration, and one tensor after the other."""

    where: str  # what errors call it
    entries: dict[str, TensorEntry]
    configuration: dict[str, Any]  # its quantization_config; empty where there is none

    def read(self, key: str) -> Tensor:
        """The tensor of this key, to be copied: it may be another's, or a part of a mapped file."""
        raise NotImplementedError


class _StateDict(Checkpoint):
    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.where, self.configuration, self._tensors = "the state_dict", {}, tensors
        self.entries = {key: _entry(value) for key, value in tensors.items()}

    def read(self, key: str) -> Tensor:
        return self._tensors[key].detach()  # type: ignore[no-any-return]


def _entry(value: object) -> TensorEntry:
    if not isinstance(value, Tensor):
        return TensorEntry(None, (), f"a {type(value).__name__}")
    if value.layout != torch.strided:
        return TensorEntry(None, tuple(value.shape), f"{value.layout}".removeprefix("torch."))
    return TensorEntry(value.dtype, tuple(value.shape), str(value.dtype).removeprefix("torch."))


class _Files(Checkpoint):
    """Safetensors files, whose headers are read at first, and whose tensors when they are asked for."""

    def __init__(self, path: Path, files: list[Path], index: Mapping[str, str], opened: ExitStack) -> None:
        self.where, self.configuration = str(path), _configuration(path if path.is_dir() else path.parent)
        self.entries, self._of = {}, {}
        for file in files:
            reader = _open(file, opened)
            names = reader.keys()
            for key in names:
                if index.get(key, file.name) != file.name:
                    continue  # the index says that it is another file's
                part = reader.get_slice(key)
                dtype = _DTYPES.get(part.get_dtype())
                called = str(dtype).removeprefix("torch.") if dtype else str(part.get_dtype())
                self.entries[key] = TensorEntry(dtype, tuple(part.get_shape()), called)
                self._of[key] = reader
        lost = [f"{key}: not in {file}, which the index names" for key, file in index.items() if key not in self._of]
        if lost:
            raise CheckpointError(listed(f"{INDEX} of {path} does not fit its files; download them again", lost))

    def read(self, key: str) -> Tensor:
        return self._of[key].get_tensor(key)  # type: ignore[no-any-return]


def _open(file: Path, opened: ExitStack) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise CheckpointError(f"{file} is a safetensors file, expected the package: pip install safetensors") from error
    try:
        return opened.enter_context(safe_open(file, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read as safetensors: {error}; download it again") from error


@contextmanager
def opened(source: object) -> Iterator[Checkpoint]:
    """The checkpoint, its files open inside the block.

    Raises:
        CheckpointError: no folder, file or mapping, a folder without safetensors, or files that an index belies.
    """
    if isinstance(source, Mapping):
        yield _StateDict(source)
        return
    if not isinstance(source, str | os.PathLike):
        raise CheckpointError(
            wrong_type("load_quantized's checkpoint", source, "a folder, a .safetensors file or a state_dict")
        )
    path = Path(source)
    with ExitStack() as stack:
        yield _Files(path, *_files(path), stack)


def _files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """The files, and which of them has which key, where an index says so."""
    if path.is_file():
        if path.suffix != ".safetensors":
            raise CheckpointError(
                f"{path} is no .safetensors file, expected one, a folder of them, or a state_dict, as torch.load returns"
            )
        return [path], {}
    if not path.is_dir():
        raise CheckpointError(
            f"{path} does not exist, expected a folder; huggingface_hub.snapshot_download(name) returns that of a model"
        )
    if (path / INDEX).is_file():
        index = json.loads((path / INDEX).read_text())["weight_map"]
        files = [path / name for name in sorted(set(index.values()))]
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise CheckpointError(f"{path} lacks {', '.join(absent)}, which {INDEX} names; download them again")
        return files, index
    single = path / SINGLE
    files = [single] if single.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{path} has no .safetensors file, expected {SINGLE}, or several and {INDEX}; of other files pass the"
            " state_dict, as torch.load returns it"
        )
    return files, {}


def _configuration(folder: Path) -> dict[str, Any]:
    """What transformers and compressed-tensors write into config.json, and ModelOpt into a file of its own."""
    config = _json(folder / "config.json").get("quantization_config") or {}
    own = _json(folder / "hf_quant_config.json").get("quantization") or {}
    return config or ({"quant_method": "modelopt"} | own if own else {})


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.is_file() else {}  # type: ignore[no-any-return]


def listed(headline: str, lines: Sequence[str | Callable[[], str]], most: int = 20) -> str:
    """A line each of the first of them; what is a function is only called then."""
    shown = (line if isinstance(line, str) else line() for line in lines[:most])
    more = [f"  and {len(lines) - most} more"] if len(lines) > most else []
    return "\n".join([f"{headline}:", *(f"  {line}" for line in shown), *more])
