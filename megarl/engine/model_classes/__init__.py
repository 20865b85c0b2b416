"""Model classes that SGLang takes instead of its own (SGLANG_EXTERNAL_MODEL_PACKAGE). Imported by SGLang only."""
