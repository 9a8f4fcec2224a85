from __future__ import annotations

import warnings

import pytest

from drivetrain.compat.user_warnings import PossibleUserWarning, disable_possible_user_warnings


def test_the_category_can_be_switched_off_alone() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        disable_possible_user_warnings()
        warnings.warn("maybe meant", PossibleUserWarning, stacklevel=1)
        with pytest.raises(UserWarning, match="not meant"):
            warnings.warn("not meant", UserWarning, stacklevel=1)
