"""Search techniques and planners, which propose settings. All implement `sirtaki.autotune.trial.Arm`."""
