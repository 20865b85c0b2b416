"""SGLang's own class of the model that an engine serves (SGLANG_EXTERNAL_MODEL_PACKAGE). Imported by SGLang only.

Without it SGLang imports all models that it has, which takes seconds, to find one. Where the class is not found here,
or cannot be imported, SGLang does that after all.
"""
