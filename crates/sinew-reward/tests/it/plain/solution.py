import decimal, datetime, asyncio, collections, enum
def add(a,b): return a+b
def sort_in_place(l): l.sort()
def add_key(d): d["x"]=1; d.setdefault("l",[]).append(2)
def apply(f, xs): return [f(x) for x in xs]
def same(x): return x
def price(d): return d*2
def next_day(d): return d+datetime.timedelta(days=1)
class MyError(ValueError):
    def __init__(self, code, text="bad"):
        super().__init__(text); self.code=code
class Vec:
    def __init__(s,x,y): s.x,s.y=x,y
    def __add__(s,o): return Vec(s.x+o.x,s.y+o.y)
    def __mul__(s,k): return Vec(s.x*k,s.y*k)
    __rmul__=__mul__
    def __eq__(s,o): return isinstance(o,Vec) and (s.x,s.y)==(o.x,o.y)
    def __hash__(s): return hash((s.x,s.y))
    def __str__(s): return f"({s.x}, {s.y})"
    def __repr__(s): return f"Vec({s.x}, {s.y})"
    def __lt__(s,o): return s.x<o.x
    def __abs__(s): return (s.x**2+s.y**2)**.5
    def __bool__(s): return bool(s.x or s.y)
    def __neg__(s): return Vec(-s.x,-s.y)
class Box:
    def __init__(s): s.items={}; s.log=[]; s.open=False
    def __setitem__(s,k,v): s.items[k]=v
    def __getitem__(s,k): return s.items[k]
    def __delitem__(s,k): del s.items[k]
    def __contains__(s,k): return k in s.items
    def __len__(s): return len(s.items)
    def __iter__(s): return iter(s.items)
    def __enter__(s): s.open=True; return s
    def __exit__(s,*e): s.open=False; return e[0] is KeyError
def fail(n): raise MyError(n)
def show(x): print("hi", x); return None
def ask(): return input("name? ")
def gen(n):
    for i in range(n): yield i*i
def tree_sum(node): return 0 if node is None else node.val+tree_sum(node.left)+tree_sum(node.right)
class Stack(list):
    def push(self,x): self.append(x)
    def peek(self): return self[-1]
Pt=collections.namedtuple("Pt","a b")
def pt(): return Pt(1,2)
class Color(enum.Enum):
    RED=1; BLUE=2
async def slow(x): await asyncio.sleep(0); return x+1
def helper(): return 5
def uses(): return helper()+1
def touch(p): open(p,"w").write("hey")
def now():
    import time; return time.time()
def rnd():
    import random; return random.randint(0,10**9)
def env():
    import os; return os.environ.get("ABC")
def asserts(x): assert x>0, "neg"
def leave(): raise SystemExit(3)
def read_all():
    import sys; return sum(map(int, sys.stdin.read().split()))
def iter_twice(it): return [x*2 for x in it]
class Iter:
    def __init__(s,n): s.n=n
    def __iter__(s): return s
    def __next__(s):
        if s.n==0: raise StopIteration
        s.n-=1; return s.n
