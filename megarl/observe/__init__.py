"""What a run shows of itself: events, metrics, progress, and the report at its end. Knows no engine and no torch."""
