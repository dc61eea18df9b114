"""What the first driver of a job makes for itself."""

from sirtaki.run.elastic.agent_crew import AgentStart, ElasticJob, new_endpoint


def job(**changes: object) -> ElasticJob:
    values = {"command": (), "environ": {}, "carried": {}, "interface": None, "one_host": True, "agents": AgentStart()}
    return ElasticJob(**{**values, **changes})  # type: ignore[arg-type]


def test_each_job_has_a_name_and_a_secret_of_its_own_and_shows_the_latter_to_nobody() -> None:
    first, second = new_endpoint(job()), new_endpoint(job())
    assert first.secret != second.secret
    assert first.name != second.name
    assert len(first.secret) == 64
    assert first.secret not in repr(first)
    for listener in (*first.listeners, *second.listeners):
        listener.close()


def test_a_job_of_one_host_listens_on_loopback_only() -> None:
    one, many = new_endpoint(job()), new_endpoint(job(one_host=False))
    assert [listener.getsockname()[0] for listener in one.listeners] == ["127.0.0.1"]
    assert many.listeners[0].getsockname()[0] == "127.0.0.1"
    assert len(many.listeners) >= 1
    for listener in (*one.listeners, *many.listeners):
        listener.close()
