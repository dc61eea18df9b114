"""What is shown of why a setting is run."""

from fakes.warmup_job import DEFAULT

from sirtaki.autotune.meta.trials import Assignment, Purpose


def test_every_purpose_has_words_of_its_own() -> None:
    words = [purpose.description for purpose in Purpose]
    assert all(words)
    assert len(set(words)) == len(Purpose)
    assert Purpose.DEFAULT.description == "measuring the default"


def test_an_assignment_is_a_value() -> None:
    one, same = (
        Assignment(knobs=DEFAULT, discarded_iterations=1, measured_iterations=2, arm="a", purpose=Purpose.TRIAL)
        for _ in range(2)
    )
    assert one == same
    assert len({one, same}) == 1
