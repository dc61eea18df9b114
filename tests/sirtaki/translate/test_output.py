from training_loops import added


def test_files_are_written_by_rank_0() -> None:
    assert added(behind='torch.save(model.state_dict(), "m.pt")') == [
        "if hvd.rank() == 0:",
        'torch.save(model.state_dict(), "m.pt")',
    ]
    assert added(behind='with open("log", "a") as log:\n    log.write("x")') == [
        'with open("log" if hvd.rank() == 0 else "/dev/null", "a") as log:'
    ]
    assert added(behind='text = open("log").read()') == []


def test_what_communicates_is_computed_on_all_ranks() -> None:
    lines = added("wandb.log({'loss': loss.item()})", before="import wandb\n")
    assert lines == ["ranks.on_root(wandb.log)({'loss': ranks.average(loss.item())})"]


def test_what_rank_0_has_written_is_waited_for() -> None:
    lines = added(behind='torch.save(model, "m.pt")\nmodel = torch.load("m.pt")')
    assert "hvd.barrier()  # rank 0 may be writing it" in lines


def test_others_print_log_and_draw_nothing() -> None:
    assert "print = ranks.on_root(print)" in added(behind="print(epoch)")
    assert "if hvd.rank() != 0:" in added(before="import logging\n")
    lines = added(before="from tqdm import tqdm\n", behind="for i in tqdm(range(3)):\n    pass")
    assert lines == ["for i in tqdm(range(3), disable=hvd.rank() != 0):"]
