"""The sample repository and its server, shared by the tests of the pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.web.server import WebServer
from tests.web.served import Client, serving
from tools.sample_repository import Sample, sample_repository


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sample]:
    with sample_repository(tmp_path_factory.mktemp("sample")) as made:
        yield made


@pytest.fixture(scope="module")  # its threads would disturb tests of other files that need a quiet process
def server(sample: Sample, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    with serving([sample.root], tmp_path_factory.mktemp("data")) as made:
        yield made


@pytest.fixture
def client(server: WebServer) -> Client:
    return Client(server)
