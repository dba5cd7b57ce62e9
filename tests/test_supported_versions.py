"""The ranges of other packages' versions: held by pip, and by the versions that the tests ran with."""

import pytest
from packaging.requirements import Requirement
from support import helpers

REPOSITORY = helpers.REPOSITORY
LINES = [line for line in (REPOSITORY / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
RANGES = {requirement.name: requirement.specifier for requirement in map(Requirement, LINES)}


@pytest.mark.parametrize("name", ["py311", "py313", "lowest"])
def test_what_the_tests_ran_with_is_in_range(name: str):
    lines = (REPOSITORY / "constraints" / f"{name}.txt").read_text().splitlines()
    pinned = {line.name.replace("_", "-"): line.specifier for line in map(Requirement, lines)}
    for package, allowed in RANGES.items():
        [pin] = pinned[package.replace("_", "-")]
        assert pin.operator == "=="
        assert pin.version in allowed, package
        if name == "lowest" and allowed:
            [least] = [bound.version for bound in allowed if bound.operator == ">="]
            assert Requirement(f"{package}=={least}").specifier.contains(pin.version), package
