"""One run: launch, preflight, build, the loop, buffer, evaluation, saver, resume."""
