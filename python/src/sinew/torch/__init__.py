"""The PyTorch policy server: holds weights, gradients and optimizer state of a `transformers` causal model.

Tokens come in, log-probabilities go out, derivatives come in. There is no algorithm, no loss and no process
manager here. Start it with `python -m sinew.torch`, once per rank, or by `torchrun`.
"""
