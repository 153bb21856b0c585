import unittest, io, contextlib, copy, asyncio, os, random, time
from unittest import mock
from decimal import Decimal
from datetime import date, datetime, timedelta
from fractions import Fraction
from solution import *
import solution
class Node:
    def __init__(self, val, left=None, right=None): self.val, self.left, self.right = val, left, right
class T(unittest.TestCase):
    def test_inplace(self):
        l=[3,1,2]; self.assertIsNone(sort_in_place(l)); self.assertEqual(l,[1,2,3])
        d={"a":[1]}; inner=d["a"]; add_key(d); self.assertEqual(d,{"a":[1],"x":1,"l":[2]}); self.assertIs(d["a"],inner)
        self.assertIs(same(l), l)
    def test_lambda(self): self.assertEqual(apply(lambda x:x+1,[1,2]),[2,3]); self.assertEqual(apply(str.upper,["a"]),["A"]); self.assertEqual(apply(abs,[-1]),[1])
    def test_lambda_raises(self):
        def f(x): raise KeyError("no")
        with self.assertRaises(KeyError): apply(f,[1])
    def test_decimal(self): self.assertEqual(price(Decimal("1.5")),Decimal("3.0")); self.assertEqual(price(Fraction(1,3)),Fraction(2,3))
    def test_date(self): self.assertEqual(next_day(date(2024,2,28)),date(2024,2,29)); self.assertEqual(next_day(datetime(2024,2,28,5)),datetime(2024,2,29,5))
    def test_own_class(self): self.assertEqual(tree_sum(Node(1,Node(2),Node(3))),6)
    def test_ops(self):
        v=Vec(1,2); w=Vec(3,4)
        self.assertEqual(v+w,Vec(4,6)); self.assertEqual(v*2,Vec(2,4)); self.assertEqual(2*v,Vec(2,4)); self.assertNotEqual(v,w)
        self.assertEqual(str(v),"(1, 2)"); self.assertEqual(repr(v),"Vec(1, 2)"); self.assertEqual(f"{v}","(1, 2)")
        self.assertTrue(v<w); self.assertEqual(abs(w),5.0); self.assertFalse(Vec(0,0)); self.assertEqual(-v,Vec(-1,-2))
        self.assertEqual(len({v,Vec(1,2)}),1); self.assertEqual(sorted([w,v])[0],v); self.assertIsInstance(v,Vec); v.x=9; self.assertEqual(v.x,9)
        self.assertEqual(sum([v,w],Vec(0,0)).y,6)
    def test_box(self):
        b=Box(); b["k"]=3; self.assertEqual(b["k"],3); self.assertIn("k",b); self.assertNotIn("z",b); self.assertEqual(len(b),1); self.assertEqual(list(b),["k"])
        del b["k"]; self.assertEqual(len(b),0)
        with self.assertRaises(KeyError): b["q"]
        with b as c: self.assertTrue(c.open); self.assertIs(b,c)
        self.assertFalse(b.open)
        with b: raise KeyError("eaten")
        b.log.append(1); self.assertEqual(b.log,[1])
    def test_error(self):
        with self.assertRaises(MyError) as c: fail(7)
        self.assertEqual(c.exception.code,7); self.assertEqual(str(c.exception),"bad")
        with self.assertRaises(ValueError): fail(7)
        try: fail(3)
        except MyError as e: self.assertEqual(e.code,3)
        self.assertTrue(issubclass(MyError,ValueError))
    def test_print(self):
        out=io.StringIO()
        with contextlib.redirect_stdout(out): show(3)
        self.assertEqual(out.getvalue(),"hi 3\n")
        with mock.patch("sys.stdout",new_callable=io.StringIO) as o:
            show(4); self.assertEqual(o.getvalue(),"hi 4\n")
        with mock.patch("builtins.print") as p: pass
    def test_input(self):
        with mock.patch("builtins.input",return_value="bob"): self.assertEqual(ask(),"bob")
        with mock.patch("sys.stdin",io.StringIO("eve\n")): self.assertEqual(ask(),"eve")
        with mock.patch("sys.stdin",io.StringIO("1 2\n3")): self.assertEqual(read_all(),6)
    def test_next(self):
        g=gen(3); self.assertEqual(next(g),0); self.assertEqual(list(g),[1,4]); self.assertEqual(next(g,None),None)
        self.assertEqual(list(Iter(3)),[2,1,0]); it=iter(Iter(1)); next(it)
        with self.assertRaises(StopIteration): next(it)
    def test_iter_arg(self): self.assertEqual(iter_twice(iter([1,2])),[2,4]); self.assertEqual(iter_twice(x for x in (1,2)),[2,4]); self.assertEqual(iter_twice(range(2)),[0,2]); self.assertEqual(iter_twice({1:2}.keys()),[2])
    def test_list_sub(self):
        s=Stack(); s.push(1); s.push(2); self.assertEqual(s.peek(),2); self.assertEqual(s,[1,2]); self.assertIsInstance(s,list); self.assertEqual(s.pop(),2); self.assertEqual(len(s),1)
        p=pt(); self.assertEqual(p,(1,2)); self.assertEqual(p.b,2); a,b=p; self.assertEqual(b,2)
    def test_enum(self): self.assertEqual(Color.RED,Color(1)); self.assertEqual(Color.RED.name,"RED"); self.assertIs(Color.RED,Color["RED"])
    def test_async(self): self.assertEqual(asyncio.run(slow(1)),2)
    def test_patch(self):
        with mock.patch("solution.helper",return_value=10): self.assertEqual(uses(),11)
        self.assertEqual(uses(),6)
        with mock.patch("time.time",return_value=5.0): self.assertEqual(now(),5.0)
        solution.helper=lambda: 1
        self.assertEqual(uses(),2)
    def test_file(self): touch("abc.txt"); self.assertEqual(open("abc.txt").read(),"hey")
    def test_random(self):
        random.seed(3); a=random.randint(0,10**9); random.seed(3); self.assertEqual(rnd(),a)
    def test_env(self):
        os.environ["ABC"]="1"; self.assertEqual(env(),"1")
    def test_assert(self):
        with self.assertRaises(AssertionError): asserts(-1)
        with self.assertRaises(SystemExit): leave()
    def test_mock(self):
        m=mock.Mock(return_value=3); self.assertEqual(apply(m,[1]),[3]); m.assert_called_once_with(1)
    def test_copy(self): v=Vec(1,2); w=copy.deepcopy(v); w.x=5; self.assertEqual(v.x,1)
    def test_deque(self):
        import collections
        d=collections.deque([1,2]); self.assertIs(same(d),d); self.assertEqual(same(collections.Counter("aab"))["a"],2)
