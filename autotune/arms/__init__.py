"""Search techniques and planners. All implement `sirtaki.autotune.trial.Arm`."""
