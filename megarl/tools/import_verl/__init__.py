"""verl configurations as recipes, with a report on every key."""
