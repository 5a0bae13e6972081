"""Servers that tests share: starting one is slow, and serving many clients is their trade."""

import pytest
from inflight import TINY_MODEL, Server, default_model


@pytest.fixture(scope="session")
def server():
    """The default model."""
    with Server(default_model()) as running:
        yield running


@pytest.fixture(scope="session")
def tiny():
    """A random model, for what does not depend on what is said."""
    with Server(TINY_MODEL) as running:
        yield running


@pytest.fixture(scope="session")
def client(server):
    return server.client()


@pytest.fixture(scope="session")
def anthropic(server):
    return server.anthropic()


@pytest.fixture(scope="session")
def model(client):
    """The name under which the default model is served."""
    return client.models.list().data[0].id


@pytest.fixture(autouse=True)
def servers_live_on(request):
    """No test may cost a shared server its life."""
    yield
    for name in {"server", "tiny"} & set(request.fixturenames):
        shared = request.getfixturevalue(name)
        assert shared.process.poll() is None, f"the server died:\n{shared.output()}"
