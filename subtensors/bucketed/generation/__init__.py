"""Text from Hugging Face models: their own `generate` over bucketed programs."""
