"""A simulated world in which several drivers run one run, with accidents, on virtual time. One seed is one history."""
