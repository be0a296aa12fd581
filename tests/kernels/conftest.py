"""The backend that an operation is tested on."""

from collections.abc import Iterator

import pytest
from backends import running

from headstart.kernels import Backend


@pytest.fixture(scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """The backend of a name that a test is parametrised with."""
    with running(request.param) as made:
        yield made
