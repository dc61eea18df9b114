"""Records a job, replays it, looks for a better plan, and draws pages; training never needs it."""
