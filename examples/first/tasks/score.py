def small(output):
    return sum("a" <= c <= "z" for c in output) / max(len(output), 1)
