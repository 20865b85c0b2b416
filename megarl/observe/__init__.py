"""Events, metrics, loggers and reports of a run. No torch, no engine."""
