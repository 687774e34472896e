import pytest


@pytest.fixture
def _force_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the int8 engine whatever this machine's clock says of it."""
    monkeypatch.setattr("adasim.neighbors.quantized.int8_is_faster", lambda device, dim: True)
