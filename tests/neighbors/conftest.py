import sys

import pytest


@pytest.fixture
def _force_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the int8 engine whatever this machine's clock says of it."""
    module = sys.modules["adasim.neighbors.search"]  # the package's attribute of that name is the function
    monkeypatch.setattr(module, "int8_is_faster", lambda dim: dim > 1)
