"""Model classes that SGLang takes instead of its own (SGLANG_EXTERNAL_MODEL_PACKAGE). Imported by SGLang only.

SGLang passes over a module of this package that it cannot import, and serves its own class instead: other heads, a
shorter window, no record of experts. An error while the package itself is imported ends the engine, with its reason.
"""

from megarl.engine.model_classes import heads as heads
