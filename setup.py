"""Makes the description that package indexes show: the README, whose links lead to this version's files in the
repository that pyproject.toml names. Everything else is in pyproject.toml and setup.cfg."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def written(file: str, name: str) -> str:
    """Returns the text that a file assigns to a name at the beginning of a line."""
    [found] = re.findall(rf'^{name} = "(.+)"$', (ROOT / file).read_text(), re.MULTILINE)
    return str(found)


def description() -> str:
    """Returns the README with links that work anywhere. A tag has the name of its version."""
    repository, version = written("pyproject.toml", "Repository"), written("te_inductor/__init__.py", "__version__")
    here = f"]({repository}/blob/v{version}/"
    text = re.sub(r"\]\((?=#)", f"{here}README.md", (ROOT / "README.md").read_text())
    return re.sub(r"\]\((?![a-z]+:)", here, text)


setup(long_description=description(), long_description_content_type="text/markdown")
