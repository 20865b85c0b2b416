"""Options of Megatron and SGLang that a recipe passes on: their names, their types, and which of them megarl owns.

Neither library is imported: what they take is in a data file each, written from the pinned release.
"""

from megarl.config.native.check import check_native, complain
from megarl.config.native.library import Library, NativeField, NativeLibrary, read_library

__all__ = ["Library", "NativeField", "NativeLibrary", "check_native", "complain", "read_library"]
