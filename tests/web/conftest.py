"""The sample repository and its server, shared by the tests of the pages."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.issues.tracker import Tracker
from holdfast.repository.opening import open_tracker
from holdfast.web.server import WebServer
from tests.cli.commands import holdfast
from tests.support.browser import Browser
from tests.web.served import Client, serving
from tests.web.visited import Pages
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


@pytest.fixture
def pages(browser: Browser, server: WebServer) -> Iterator[Pages]:
    browser.size(1360, 860)
    browser.dark(on=False)
    made = Pages(browser, server)
    browser.complaints()
    yield made
    with contextlib.suppress(Exception):
        browser.driver.execute_script("localStorage.clear()")


@pytest.fixture
def tracker(sample: Sample) -> Tracker:
    return open_tracker(sample.root, actor="human:ada")


@pytest.fixture(scope="module")
def exported(sample: Sample, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample as one file."""
    path = tmp_path_factory.mktemp("exported") / "all.html"
    made = holdfast("web", "--export", path, "--json", cwd=sample.checkout)
    assert json.loads(made.stdout)["data"]["bytes"] == path.stat().st_size
    return path
