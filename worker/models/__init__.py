"""Model implementations: config parsing, rotary embeddings, the Llama family, and the registry of architectures."""
