"""What all tests share: where bigger test data lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from picaflor import settings


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder named by PICAFLOR_TEST_DATA; the test is skipped, with this reason, where it is unset."""
    folder = settings.test_data()
    if folder is None:
        pytest.skip("PICAFLOR_TEST_DATA is unset: it names the folder of reference vectors and models")
    if not folder.is_dir():
        pytest.fail(f"PICAFLOR_TEST_DATA names {folder}, which is no folder")
    return folder
