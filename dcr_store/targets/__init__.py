"""What receivers write to: safetensors directories and memory. Satisfies ``ports.Target``; knows no receiver."""
