"""From the files that people have (Hugging Face's, GGUF) to a pack, within bounded memory and through any stop."""
