"""The list of deliberate faults fits the code and the tests; `make mutants` puts the faults in."""

import ast
from pathlib import Path

import pytest
from mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if isinstance(m, Mutant)], ids=lambda mutant: mutant.name)
def test_a_fault_fits_in_one_place(mutant):
    text = (ROOT / "src" / "safeicrl" / mutant.file).read_text()
    changed = mutant.changed(text)
    assert changed != text
    ast.parse(changed)


def test_every_fault_names_a_test_that_exists():
    for mutant in MUTANTS:
        file, _, name = mutant.test.partition("::")
        source = (Path(__file__).parent / file).read_text()
        assert f"def {name.partition('[')[0]}(" in source, mutant.test


def test_a_fault_that_no_longer_fits_is_refused():
    mutant = Mutant(name="x", file="f", old="a", new="b", test="t")
    for text in ("c", "aa"):
        with pytest.raises(SystemExit, match="times, not once"):
            mutant.changed(text)
