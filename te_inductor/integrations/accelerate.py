"""Accelerate knows the backends of a list; `register` adds "te" to it.

Sources: accelerate 1.15, utils/dataclasses.py (`DynamoBackend`, `TorchDynamoPlugin`), utils/launch.py,
commands/launch.py (the choices of `--dynamo_backend`)."""

import sys
from typing import Any

from te_inductor.integrations.versions import require

NAME = "TE"  # Accelerate writes names of backends in capitals


def register() -> None:
    """Make Accelerate, and what goes through it (transformers' Trainer, TRL), take "te" for a backend: in
    `TorchDynamoPlugin(backend="te")`, `TrainingArguments(torch_compile_backend="te")`, the environment variable
    ACCELERATE_DYNAMO_BACKEND and a configuration file. To be called before an `Accelerator` is made, in each process;
    a second call changes nothing.

    Raises:
        ImportError: Accelerate is not installed, older than version 1.10, or its list of backends is not the enumeration
            that it was.
    """
    require("accelerate")
    from accelerate.utils import DynamoBackend

    members = getattr(DynamoBackend, "_value2member_map_", None)
    if not isinstance(members, dict) or not issubclass(DynamoBackend, str):
        import accelerate

        raise ImportError(
            f"accelerate {accelerate.__version__} has no enumeration of strings as accelerate.utils.DynamoBackend,"
            " expected the one of version 1.15; compile the model before Accelerate has it:"
            ' model.compile(backend="te")'
        )
    if NAME not in members:
        member = str.__new__(DynamoBackend, NAME)
        member._name_ = member._value_ = NAME
        members[NAME] = DynamoBackend._member_map_[NAME] = member
        DynamoBackend._member_names_.append(NAME)
    choices: list[str] | None = getattr(
        sys.modules.get("accelerate.commands.config.config_utils"), "DYNAMO_BACKENDS", None
    )
    if choices is not None and NAME not in choices:
        choices.append(NAME)


def main(arguments: list[str] | None = None) -> Any:
    """``python -m te_inductor.integrations.accelerate launch …``: Accelerate's command, which then knows the name. The
    script that it starts calls `register` itself."""
    import accelerate.commands.config.config_utils  # noqa: F401  (`register` adds to its list)

    register()
    from accelerate.commands import accelerate_cli

    if arguments is not None:
        sys.argv[1:] = arguments
    return accelerate_cli.main()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
