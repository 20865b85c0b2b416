"""Options of Megatron and SGLang that a recipe passes on: their names, their types, and which of them megarl sets.

Neither library is imported: a data file per library, written from the pinned release, lists its options.
"""
