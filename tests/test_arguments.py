"""Bad arguments of public classes and functions raise a ValueError that shows the value, when the object is made."""

from __future__ import annotations

import pytest

from fuzz.arguments import Target, single_faults, targets


@pytest.mark.parametrize("target", targets(), ids=lambda target: target.name)
def test_bad_arguments_raise_a_value_error(target: Target) -> None:
    assert list(single_faults(target)) == []
