import re
import urllib.error
import urllib.request

import pytest

from sirtaki.watch import IterationEnded
from sirtaki.watch.prometheus import MetricsServer, render
from sirtaki.watch.watchers import Totals


def some() -> Totals:
    totals = Totals()
    totals.iteration(IterationEnded(number=1, step_s=0.5, communication_s=0.3, exposed_s=0.1, n_bytes=64, tuning=False))
    return totals


def test_each_line_is_one_that_prometheus_reads() -> None:
    text = render(some(), rank=1, size=4)
    for line in text.splitlines():
        assert re.fullmatch(r'# (HELP|TYPE) sirtaki_\w+ .+|sirtaki_\w+\{rank="1"\} [\d.e+-]+', line), line
    assert 'sirtaki_exposed_share{rank="1"} 0.2\n' in text
    assert 'sirtaki_gradient_bytes_total{rank="1"} 64\n' in text
    assert 'sirtaki_ranks{rank="1"} 4\n' in text


def test_a_port_answers_until_it_is_closed() -> None:
    totals = some()
    server = MetricsServer(totals, host="127.0.0.1", port=0, rank=0, size=1)
    address = f"http://127.0.0.1:{server.port}"
    try:
        with urllib.request.urlopen(f"{address}/metrics", timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert answer.read().decode() == render(totals, rank=0, size=1)
        with pytest.raises(urllib.error.HTTPError, match="404") as err:
            urllib.request.urlopen(f"{address}/other", timeout=10)
        err.value.close()
    finally:
        server.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{address}/metrics", timeout=10)
