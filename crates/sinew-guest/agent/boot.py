def take():
    import os, sys
    import array, bisect, collections, copy, datetime, decimal, fractions, functools, heapq, io
    import itertools, json, math, operator, random, re, statistics, string, struct, textwrap, time
    import traceback, typing
    pieces = []
    while piece := os.read(3, 1 << 16):
        pieces.append(piece)
    os.close(3)
    data, at = b''.join(pieces), 0
    if not data:
        os._exit(0)
    def number():
        nonlocal at
        at += 4
        return int.from_bytes(data[at - 4:at], 'little')
    def text():
        nonlocal at
        size = number()
        at += size
        return data[at - size:at]
    env = [text().partition(b'=') for _ in range(number())]
    code = text().decode()
    # Copies of a machine share this interpreter.
    random.seed()
    os.environ.clear()
    os.environ.update((os.fsdecode(k), os.fsdecode(v)) for k, _, v in env)
    # What goes wrong is shown without the line of this file that called the program.
    def hook(kind, error, trace):
        sys.__excepthook__(kind, error, trace and trace.tb_next)
    sys.excepthook = hook
    return compile(code, '<string>', 'exec')
def main(take):
    names = globals()
    for name in ('take', 'main'):
        del names[name]
    return take(), names
exec(*main(take))
