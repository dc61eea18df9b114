"""What a recorded job would do: its global graph, replayed event by event. `docs/explanation/replay.md`."""
