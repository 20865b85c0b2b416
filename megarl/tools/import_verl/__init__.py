"""verl configurations as recipes: every key is accounted for, none is dropped without a word."""

from megarl.tools.import_verl.translate import Entry, Imported, import_verl

__all__ = ["Entry", "Imported", "import_verl"]
