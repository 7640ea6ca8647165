"""docs/guides/troubleshooting.md has an entry for each error and warning of the package, and none for others."""

import re

import pytest

from te_inductor import errors
from tests import messages
from tests.forked import ROOT

PAGE = (ROOT / "docs/guides/troubleshooting.md").read_text()
CLASSES = [
    name for name, found in vars(errors).items() if isinstance(found, type) and name.endswith(("Error", "Warning"))
]
# Their texts are of the form "what it is, what was expected", one for each option, argument and field.
BY_FORM = {"TEInductorError", "OptionError", "RecipeError"}
SAID = {"FallbackWarning": messages.warnings, "FallbackError": messages.assertions}
WORDS = re.compile(r"\w{3,}")


def fragments(section: str) -> list[str]:
    """What the first cells of a section's tables quote."""
    rows = re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)
    return [text for row in rows for text in re.findall(r"``? ?(.+?) ?``?(?=[ ,;)]|$)", row)]


def section(heading: str) -> str:
    return re.split(r"^##+ ", PAGE.partition(f"{heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def test_every_class_has_a_section():
    assert not [name for name in CLASSES if f"## `{name}`\n" not in PAGE]


@pytest.mark.parametrize("name", [name for name in CLASSES if name not in BY_FORM])
def test_every_text_has_an_entry_and_every_entry_a_text(name):
    texts = list(SAID[name]() if name in SAID else messages.errors(name))
    found = fragments(section(f"## `{name}`"))
    lacking = [
        (place, text)
        for place, text in texts
        if WORDS.search(text) and not any(messages.says(one, text) for one in found)
    ]
    assert not lacking, f"docs/guides/troubleshooting.md says nothing of {lacking}"
    stale = [one for one in found if not any(messages.says(one, text) for _, text in texts)]
    assert not stale, f"no {name} says {stale}"


def test_a_new_error_is_noticed():
    assert not any(messages.says(one, "a text that nobody has written") for one in fragments(PAGE))
    assert messages.says("a … is here", "te_inductor: a … of … is here") and not messages.says("is … a", "a … is")
