"""Implementation of `sirtaki.ray`: ranks that are Ray actors (`RayExecutor`), and a configuration for Ray Train."""
