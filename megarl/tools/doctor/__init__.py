"""What is wrong with a machine, a cluster or a run, and what to do about it. Says; changes nothing."""
