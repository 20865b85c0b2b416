"""Credit and losses. Only the losses use torch."""
