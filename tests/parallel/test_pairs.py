"""Pairwise coverage of the options of a training step: eight devices compute each case as one device does."""

import pytest

from cases import CHOICES, admissible, pairs, pairwise
from eight_devices import check_cases


def test_every_pair_of_choices_is_in_a_case():
    cases = pairwise()
    assert set().union(*map(pairs, cases)) == set().union(*map(pairs, admissible()))
    for name, choices in CHOICES.items():
        assert {getattr(case, name) for case in cases} == set(choices)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_loss_and_gradient_of_every_pair_of_choices(part):
    check_cases(pairwise()[part::3])
