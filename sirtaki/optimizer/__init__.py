"""What to change in a recorded job so that its steps get shorter: dPRO's search (section 5), judged by the replayer."""
