"""Converts Hugging Face and Weaver checkpoints to the format that `tfm_jax` loads; command line `tfm-convert`."""
