"""One application on one Ray for all tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ray_cluster import Cluster, cluster


@pytest.fixture(scope="session")
def served() -> Iterator[Cluster]:
    pytest.importorskip("ray", reason="ray is not installed: pip install 'thinkfold[ray]'")
    with cluster() as found:
        yield found
