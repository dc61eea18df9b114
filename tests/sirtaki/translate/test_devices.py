import pytest
from training_loops import HEAD, added

from sirtaki.errors import TranslationError
from sirtaki.translate import translate


def test_each_rank_takes_its_own_device() -> None:
    lines = added(before='import torch\ndevice = torch.device("cuda:0")\n')
    assert 'device = torch.device(f"cuda:{hvd.local_rank()}")' in lines
    assert "torch.cuda.set_device(hvd.local_rank())" in lines


@pytest.mark.parametrize("line", ['device = "cuda:1"', 'os.environ["CUDA_VISIBLE_DEVICES"] = "0"'])
def test_devices_that_all_ranks_would_share_are_refused(line: str) -> None:
    with pytest.raises(TranslationError, match="line 2"):
        translate(f"import os\n{line}\n{HEAD}")


def test_data_parallel_is_undone() -> None:
    wrapped = HEAD.replace(
        "optimizer = ", "model = torch.nn.DataParallel(model)\nhead = model.module.weight\noptimizer = ", 1
    )
    after = translate(wrapped).after
    assert "DataParallel" not in after
    assert "head = model.weight" in after
