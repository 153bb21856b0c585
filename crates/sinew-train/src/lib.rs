//! Packing, losses, optimizer, LoRA, checkpoints. Knows loss specifications, no algorithm.
