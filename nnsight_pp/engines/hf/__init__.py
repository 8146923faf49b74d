"""What a Hugging Face model needs around it: loading, tasks, encoding, batching, generation."""
