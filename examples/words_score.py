"""Reward of recipes/agent-service.toml and recipes/agent-function.toml; parameters are bound by name."""


def score(output):
    """Share of small letters; 1 counts as a success."""
    text = output.strip()
    return sum("a" <= c <= "z" for c in text) / max(len(text), 1)
