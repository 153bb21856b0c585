MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
ALIAS = "Qwen/Qwen3-4B-Instruct-2507:smollm2"
MODELS = [MODEL, ALIAS]
