"""From raw text to the tensors of every training step of a language model."""
