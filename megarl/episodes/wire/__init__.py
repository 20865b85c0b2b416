"""The dialects of HTTP in which agents ask the model, one module each; `values` has what they have in common."""
