import pytest

from sirtaki.errors import TranslationError
from sirtaki.translate import translate


def test_the_import_changes() -> None:
    before = "import horovod.torch as hvd\nfrom horovod.torch.elastic import run\nhvd.init()\n"
    assert translate(before).after == before.replace("horovod", "sirtaki")


def test_other_frameworks_are_refused() -> None:
    with pytest.raises(TranslationError, match=r"line 2: `horovod.keras` has no counterpart"):
        translate("import os\nimport horovod.keras as hvd\n")
