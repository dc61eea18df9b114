"""Training with `GradScaler` and autocast on ranks: the same steps are skipped as in one process."""

from rank_jobs import OVER_MESH, UNTUNED, Job, played_on_ranks, slow

ENV = {**OVER_MESH, **UNTUNED}

test_scaled_losses_train_as_in_one_process = played_on_ranks("mixed_precision", Job(2, env=ENV), slow(Job(3, env=ENV)))
