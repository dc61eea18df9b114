from training_loops import HEAD

from sirtaki.translate import translate


def test_a_translation_has_a_diff_and_notes() -> None:
    done = translate(HEAD)
    assert done.before == HEAD
    assert "+hvd.init()\n" in done.diff("train.py")
    assert any("learning rates stay" in text for _, text in done.notes)


def test_what_uses_sirtaki_already_stays() -> None:
    code = "import sirtaki.torch as hvd\nhvd.init()\n"
    done = translate(code)
    assert done.after == code
    assert done.diff("train.py") == ""
