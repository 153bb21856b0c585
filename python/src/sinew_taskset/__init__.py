"""The taskset `sinew-taskset` of `verifiers`: environments of Sinew. See `sinew.verifiers`."""

from sinew.verifiers import SinewTaskset

__all__ = ["SinewTaskset"]
