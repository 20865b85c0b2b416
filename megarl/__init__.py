"""megarl: Megatron trains, SGLang generates, one slice algebra moves weights between them."""

__version__ = "0.1.0"
