"""A tiny model, and `sinew serve --tinker` over it, for the tests of this folder.

`SINEW_BIN` names the program; without it, `target/debug/sinew` of this repository is taken.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import torch

ROOT = Path(__file__).parents[3]
BIN = Path(os.environ.get("SINEW_BIN", ROOT / "target/debug/sinew"))

# Names under which the one model is served.
MODEL = "tiny/model"
ALIAS = "tiny/model:alias"

# Keys of two tenants.
ANN = "tml-ann-0123456789abcdef"
BOB = "tml-bob-0123456789abcdef"

# Tokens 3 to 96 are the characters from "!" to "~".
VOCABULARY = 97
END = 2
CONTEXT = 256


def write_model(folder: Path, seed: int = 3) -> Path:
    """Writes a tiny Llama with random weights, and a tokenizer of single characters."""
    import tokenizers
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=CONTEXT,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=END,
        initializer_range=0.08,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.parameters():
            # Fresh norms are 1: random ones show more.
            if tensor.dim() < 2:
                tensor.add_(0.1 * torch.randn_like(tensor))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    words = ["<pad>", "<s>", "</s>", *(chr(code) for code in range(33, 127))]
    vocabulary = {word: index for index, word in enumerate(words)}
    assert len(vocabulary) == VOCABULARY
    letters = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    letters.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = tokenizers.decoders.ByteLevel()
    letters.add_special_tokens(words[:3])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(folder)
    return folder


class Server:
    """One server, which can be killed and started again on its port and its state."""

    def __init__(self, folder: Path, model: Path, more: tuple[str, ...] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.model, self.more = folder, model, more
        # Held, so that nobody else gets the port while the server does not listen there.
        self.held = socket.socket()
        self.held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.held.bind(("127.0.0.1", 0))
        self.port = self.held.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.state = folder / "state"
        self.keys = folder / "keys"
        self.keys.write_text(f"ann:{ANN}\nbob:{BOB}\n")
        self.keys.chmod(0o600)
        self.process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        """The command line: one model under two names, two tenants, state in a folder."""
        return [
            str(BIN),
            "serve",
            "--tinker",
            f"127.0.0.1:{self.port}",
            "--model",
            f"{MODEL},{ALIAS}={self.model}",
            "--context",
            str(CONTEXT),
            "--state",
            str(self.state),
            "--keys",
            str(self.keys),
            *self.more,
        ]

    def start(self, seconds: float = 120.0) -> Server:
        """Starts the program, and waits until it answers."""
        with open(self.folder / "server.log", "ab") as log:
            # Products in f32: AMX rounds their inputs to bfloat16.
            environment = {**os.environ, "SINEW_CPU": "avx2"}
            self.process = subprocess.Popen(
                self.command(), env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        end = time.monotonic() + seconds
        while not self.answers():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server did not start:\n{self.log()}")
            time.sleep(0.05)
        return self

    def answers(self) -> bool:
        """Whether the server answers without a key."""
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=5) as answer:
                return answer.status == 200
        return False

    def kill(self) -> None:
        """Ends the process as a power failure would."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        """Ends the process as an operator would, and fails if it does not end by itself."""
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            try:
                code = self.process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
            self.process = None
            assert code == 0, f"the server ended with {code}:\n{self.log()}"

    def log(self) -> str:
        """The output of the server."""
        return (self.folder / "server.log").read_text(errors="replace")
