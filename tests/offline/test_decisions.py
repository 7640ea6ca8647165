"""What `explain(…, target=…)` decides about a device that is elsewhere is what it decides where torch has that device."""

import json

import pytest

from tests.offline.generate import NAMES
from tests.offline.harness import server


def decided(arch: str, recipe: str) -> dict:
    done = server().run("tests.offline.decisions", "", arch, recipe)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.quick("current-90")
@pytest.mark.parametrize("arch", NAMES)
@pytest.mark.parametrize("recipe", ["current", "delayed", "block", "mxfp8"])
def test_a_target_is_decided_about_as_the_device_would_be(recipe, arch):
    there, here = decided(str(arch), recipe), decided(NAMES[arch], recipe)
    assert there["sites"] and there["failure"] is None and bool(there["weights"]) == (arch == 90 and recipe != "mxfp8")
    assert here == there
