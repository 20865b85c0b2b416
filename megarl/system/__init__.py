"""This machine: child processes, workers of user code, addresses, `/proc`, secrets, locks, fault points."""
