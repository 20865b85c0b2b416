"""Estimates for a recipe before anything is started: places, memory, traffic, time. No torch, no engine, no Ray."""
