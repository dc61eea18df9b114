from training_loops import HEAD

from sirtaki.translate import translate
from sirtaki.translate.changes import free_name
from sirtaki.translate.source import Source


def test_ranks_are_known_behind_the_imports_or_in_the_main_block() -> None:
    assert "from torch.utils.data import DataLoader\nimport sirtaki.torch as hvd\n" in translate(HEAD).after
    body = HEAD.split("\n\n", 1)
    inside = "def main():\n" + "".join(f"    {line}\n" for line in body[1].splitlines())
    guarded = f'{body[0]}\n\n{inside}\nif __name__ == "__main__":\n    main()\n'
    after = translate(guarded).after
    assert 'if __name__ == "__main__":\n    hvd.init()\n' in after
    assert after.count("hvd.init()") == 1


def test_a_name_that_is_taken_is_left_to_its_owner() -> None:
    assert free_name(Source("ranks = 1"), "ranks") == "sirtaki_ranks"
    after = translate(HEAD + "ranks = 1\n").after
    assert "from sirtaki.torch import ranks as sirtaki_ranks" in after
    assert "sirtaki_ranks.divided(" in after
