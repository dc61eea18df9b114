import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# The first example of a test pays for its imports, and the machine may be busy: a deadline would judge that.
settings.register_profile("without deadline", deadline=None)
settings.load_profile("without deadline")


@pytest.fixture
def postgresql_url() -> Iterator[str]:
    """Yield the URL of a PostgreSQL server. Our tables are dropped before and after."""
    from sqlalchemy import create_engine

    from sirtaki.registry import store as schema

    url = os.environ.get("SIRTAKI_TEST_POSTGRESQL_URL")
    if not url:
        pytest.skip("SIRTAKI_TEST_POSTGRESQL_URL names no PostgreSQL server")
    engine = create_engine(url, connect_args={"client_encoding": "utf8"})
    schema.metadata.drop_all(engine)
    yield url
    schema.metadata.drop_all(engine)
    engine.dispose()
