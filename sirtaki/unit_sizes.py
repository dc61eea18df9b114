"""The range of unit sizes, which settings, knobs, planners and the registry have in common."""

SMALLEST_UNIT_BYTES, LARGEST_UNIT_BYTES = 64 * 1024, 256 * 1024**2
"""The range of the tuner; below it the start-up of a reduction is all that counts."""
