"""Every two choices of a training step meet in a case that many devices compute as one does."""

import pytest

from cases import CHOICES, admissible, pairs, pairwise
from eight_devices import check_cases


def test_every_two_choices_meet():
    cases = pairwise()
    assert set().union(*map(pairs, cases)) == set().union(*map(pairs, admissible()))
    for name, choices in CHOICES.items():
        assert {getattr(case, name) for case in cases} == set(choices)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_loss_and_gradient_of_every_two_choices(part):
    check_cases(pairwise()[part::3])
