"""Processors of images that SGLang takes instead of its own (SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE)."""
