//! Buffers and operators with forward and backward, chosen at run time per CPU.
