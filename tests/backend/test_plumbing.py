"""What stands around the package: workflows, forms, the image, the citation. They name commands, files and one
repository, which exist."""

import re
import stat

import pytest

from te_inductor.command import _parser
from tests.forked import ROOT

yaml = pytest.importorskip("yaml")
REPOSITORY = re.search(r'^Repository = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_scripts_that_exist(path):
    workflow = yaml.safe_load(path.read_text())
    assert set(workflow["permissions"]) == {"contents"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"]
        for script in re.findall(r"^\.ci/\w+$", "\n".join(step.get("run", "") for step in job["steps"]), re.MULTILINE):
            assert (ROOT / script).stat().st_mode & stat.S_IXUSR, script
    assert ".ci/" in path.read_text()


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_asks_for_what_the_doctor_says_as_data(path):
    form = yaml.safe_load(path.read_text())
    asked = {part["id"]: part for part in form["body"] if part["type"] != "markdown"}
    assert asked["doctor"]["attributes"]["render"] == "json"
    [command] = re.findall(r"`te-inductor ([^`]+)`", asked["doctor"]["attributes"]["description"])
    assert _parser().parse_args(command.split()).json


def test_one_place_names_the_repository():
    """Another file that named it would be forgotten when it moves."""
    owner = REPOSITORY.removeprefix("https://")
    texts = {path: path.read_text() for path in ROOT.rglob("*.md") if ".venv" not in path.parts}
    texts |= {ROOT / name: (ROOT / name).read_text() for name in ("CITATION.cff", "Dockerfile", "setup.py")}
    texts |= {path: path.read_text() for path in (ROOT / ".github").rglob("*") if path.is_file()}
    assert not [path for path, text in texts.items() if owner in text]


def test_the_image_copies_what_a_build_reads():
    kept = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    assert {"te_inductor", "README.md", "LICENSE", "MANIFEST.in", "pyproject.toml", "setup.cfg", "setup.py"} == kept
    assert all((ROOT / name).exists() for name in kept)


def test_the_citation_and_hooks_are_well_formed():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation) and "version" not in citation
    for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]:
        assert {hook["language"] for hook in repo["hooks"]} == {"system"}  # the versions of .venv
