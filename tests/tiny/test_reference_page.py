"""docs/reference.md is what docs/generate_reference.py makes of the docstrings."""

from __future__ import annotations

from importlib.util import find_spec, module_from_spec, spec_from_file_location

import pytest

import plait
from tests.tiny.tree import ROOT


@pytest.fixture(scope="module")
def generator():
    if find_spec("triton") is None:
        pytest.skip("needs Triton")
    spec = spec_from_file_location("generate_reference", ROOT / "docs" / "generate_reference.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(generator):
    page = (ROOT / "docs" / "reference.md").read_text()
    assert page == generator.render(), "run: python docs/generate_reference.py"


def test_every_public_name_is_on_the_page(generator):
    on_page = {name for names in generator.SECTIONS.values() for name in names} | {"Group"}
    assert on_page == set(plait._NAMES)


def test_a_docstring_becomes_markdown(generator):
    def f(x: int, *, y: int = 1) -> int:
        """Add.

        Args:
            x: one
                number.
            y: another.

        Returns:
            The sum.
        """
        return x + y

    assert generator.signature_of("f", f) == "f(x: int, *, y: int = 1) -> int"
    assert generator.prose_of(f) == (
        "Add.\n\n**Args**\n\n- `x`: one\n  number.\n- `y`: another.\n\n**Returns**\n\nThe sum."
    )
