"""Write text with mlx_moe: the library in ten lines. Usage: python scripts/generate.py [MODEL] [PROMPT]"""

import sys

from mlx_moe import load, stream_generate

if __name__ == "__main__":
    name, prompt = [*sys.argv[1:], None, None][:2]
    model, tokenizer = load(name)
    for part in stream_generate(model, tokenizer, prompt or "def read_lines(path):", max_tokens=100):
        print(part.text, end="", flush=True)
    print(f"\n{part.generation_tokens} tokens, {part.generation_tps:.1f} tokens per second")
