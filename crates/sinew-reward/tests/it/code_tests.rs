//! `tests(COLUMN)`: fixtures and classes as frameworks run them, their needs, and forgeries against that.

use crate::code::{made, score};
use serde_json::json;

const CODE: &str = r#"```python
import os
def add(a, b):
    return a + b
def crash():
    os._exit(3)
def power(n):
    return 10 ** n
class Stack:
    def __init__(self):
        self.items = []
    def push(self, x):
        self.items.append(x)
    def all(self):
        return list(self.items)
```"#;

/// Code, and tests of it that pass in plain Python: objects of either side at the other.
const PLAIN_CODE: &str = include_str!("plain/solution.py");
const PLAIN_TESTS: &str = include_str!("plain/tests.py");

/// Passed and all tests of `tests` for `code`.
async fn share(code: &str, tests: &str) -> (f64, f64) {
    let reward = made("tests(answer)", 60.0, "").unwrap();
    let got = score(reward.as_ref(), code, json!(tests)).await;
    let got = got.unwrap_or_else(|e| panic!("{tests}: {e}"));
    let part = |name: &str| got.parts[&format!("reward/tests/{name}")];
    (part("passed"), part("tests"))
}

const FIXTURES: &str = r"
import unittest
from solution import add, Stack
log = []
def setUpModule():
    log.append('module')
class A(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.stack = Stack()
        cls.stack.push(add(1, 1))
    @classmethod
    def tearDownClass(cls):
        log.append('down')
    def setUp(self):
        self.one = 1
    def test_a(self):
        self.assertEqual(self.stack.all(), [2])
        self.assertEqual(log, ['module'])
    def test_b(self): self.assertEqual(self.one, 2)
class B(unittest.TestCase):
    def test_down(self): self.assertEqual(log, ['module', 'down'])
class C(unittest.TestCase):
    @classmethod
    def setUpClass(cls): raise ValueError('no')
    def test_c(self): pass
    def test_d(self): pass
";

const PLAIN: &str = r"
from solution import Stack, add
def setup_module(module):
    module.base = 2
def test_module(): assert base == 2
class TestStack:
    @classmethod
    def setup_class(cls): cls.limit = 3
    def setup_method(self, method):
        self.stack = Stack()
        self.name = method.__name__
    def teardown_method(self): assert self.stack.all() == [4]
    def test_push(self):
        self.stack.push(4)
        assert self.name == 'test_push' and self.limit == 3
    def test_left(self): assert add(1, 1) == 2
    def helper(self): raise ValueError
class Helper:
    def test_nothing(self): raise ValueError
";

#[tokio::test]
async fn fixtures_and_plain_classes_run_as_in_their_frameworks() {
    assert_eq!(share(CODE, FIXTURES).await, (2.0, 5.0));
    // The tear-down of `test_left` fails.
    assert_eq!(share(CODE, PLAIN).await, (2.0, 3.0));
    let helper = "class Pair:\n    x = 1\nassert add(Pair.x, 1) == 2\nassert add(1, 1) == 3";
    assert_eq!(share(CODE, helper).await, (1.0, 2.0));
}

#[tokio::test]
async fn a_crash_costs_its_own_test_alone() {
    let tests = "import unittest\nfrom solution import add, crash, Stack\nclass T(unittest.TestCase):\n    \
                 def test_a(self): crash()\n    def test_b(self): self.assertEqual(add(1, 1), 2)\n    \
                 def test_c(self):\n        s = Stack()\n        s.push(1)\n        \
                 self.assertEqual(s.all(), [1])\n";
    assert_eq!(share(CODE, tests).await, (2.0, 3.0));
    // Objects of a process end with it.
    let kept = "import unittest\nfrom solution import crash, Stack\nclass T(unittest.TestCase):\n    s = Stack()\n    \
                def test_a(self): crash()\n    def test_b(self): self.assertEqual(self.s.all(), [])\n";
    assert_eq!(share(CODE, kept).await, (0.0, 2.0));
}

#[tokio::test]
async fn integers_have_up_to_a_hundred_thousand_digits() {
    let tests = "assert power(9000) == 10 ** 9000\nassert len(str(power(9000))) == 9001\nassert power(9) == -10";
    assert_eq!(share(CODE, tests).await, (2.0, 3.0));
}

#[tokio::test]
async fn tests_that_cannot_run_here_leave_the_sample_unscored() {
    let reward = made("tests(answer)", 20.0, "").unwrap();
    for (tests, said) in [
        (
            "import no_such_package\nassert True",
            "import no_such_package, which python3",
        ),
        (
            "def test_a():\n    from no_such.part import x",
            "import no_such, which python3",
        ),
        (
            "def test_a(tmp_path):\n    pass",
            "test_a takes tmp_path: there are no fixtures",
        ),
        (
            "@pytest.mark.parametrize('a', [1])\ndef test_a(a): pass",
            "pytest itself does not run here",
        ),
        (
            "from pytest import mark as m\nslow = m.slow\n@slow\ndef test_a(): pass",
            "pytest itself does not run here",
        ),
        (
            "class TestX:\n    def test_a(self, tmp_path): pass",
            "test_a takes tmp_path: there are no fixtures",
        ),
        (
            "def twice(f):\n    return lambda *a: f(*a)\n@twice\ndef test_a(tmp_path): pass",
            "'tmp_path': there are no fixtures",
        ),
        (
            "def same(f): return f\nclass TestX:\n    @same\n    def test_a(self, tmp_path): pass",
            "'tmp_path': there are no fixtures",
        ),
        (
            "if True:\n    import no_such_package\nassert True",
            "import no_such_package, which python3",
        ),
    ] {
        let e = score(reward.as_ref(), CODE, json!(tests))
            .await
            .unwrap_err();
        assert!(e.reason.contains(said), "{tests}: {e}");
    }
    let tried =
        "try:\n    import no_such_package\nexcept ImportError:\n    pass\nassert add(1, 1) == 2";
    assert_eq!(share(CODE, tried).await, (1.0, 1.0));
}

/// A call of these gives a body that does not run.
#[tokio::test]
async fn coroutines_and_generators_never_pass() {
    let reward = made("tests(answer)", 20.0, "").unwrap();
    let case = "import unittest\nclass T(unittest.TestCase):\n    ";
    let later = "async def later(): assert False\n";
    for tests in [
        "class TestX:\n    async def test_a(self): assert add(1, 1) == 3".to_owned(),
        "class TestX:\n    def test_a(self):\n        yield\n        assert False".to_owned(),
        "class TestX:\n    def setup_method(self): yield\n    def test_a(self): pass".to_owned(),
        "async def test_a(): assert False\ndef test_b(): pass".to_owned(),
        "def test_a(): yield".to_owned(),
        format!("{case}async def test_a(self): assert False"),
        format!("{case}def test_a(self): yield"),
        format!("{later}{case}def test_a(self): return later()"),
        format!("{later}def test_a(): return later()"),
        format!("{later}class TestX:\n    def test_a(self): return later()"),
    ] {
        let e = score(reward.as_ref(), "", json!(tests)).await.unwrap_err();
        assert!(
            e.reason.contains("coroutine") || e.reason.contains("generator"),
            "{tests}: {e}"
        );
    }
    let awaited = "from unittest import IsolatedAsyncioTestCase as Case\nclass Base(Case): pass\n\
                   class T(Base):\n    async def test_a(self): self.assertEqual(add(1, 1), 2)\n    \
                   async def test_b(self): self.assertEqual(add(1, 1), 3)\n    def test_c(self): pass\n";
    assert_eq!(share(CODE, awaited).await, (2.0, 3.0));
}

#[tokio::test]
async fn what_never_runs_and_what_helps_does_not_change_the_score() {
    let unused = "if False:\n    import no_such_package\ndef helper():\n    import no_such_package\n\
                  assert add(1, 1) == 2\nassert add(1, 1) == 3";
    assert_eq!(share(CODE, unused).await, (1.0, 2.0));
    let node = "class Node(object):\n    x = 1\nassert add(1, 1) == 3\nassert add(Node.x, 1) == 2";
    assert_eq!(share(CODE, node).await, (1.0, 2.0));
    let patched =
        "from unittest import mock\n@mock.patch('os.getcwd')\ndef test_a(m): assert add(1, 1) == 2";
    assert_eq!(share(CODE, patched).await, (1.0, 1.0));
    // The code cannot choose to be unscored.
    let tests = "def test_a():\n    assert add(1, 1) == 2\n    import no_such_package\n";
    let missing = "def add(a, b):\n    e = ModuleNotFoundError('x')\n    \
                   e.name = 'no_such_package'\n    raise e";
    assert_eq!(share(missing, tests).await, (0.0, 1.0));
    let given =
        "def add(a, b): raise TypeError(\"test_a() missing 1 required positional argument: 'x'\")";
    assert_eq!(share(given, tests).await, (0.0, 1.0));
}

/// Each of these would pass if the code could reach fixtures, imports or restarts. None may score.
#[tokio::test]
async fn forgeries_of_fixtures_imports_and_restarts_do_not_score() {
    let reward = made("tests(answer)", 20.0, "").unwrap();
    let unit = "import unittest\nfrom solution import add\nclass T(unittest.TestCase):\n    @classmethod\n    \
                def setUpClass(cls): cls.got = add(1, 2)\n    def test_a(self): self.assertEqual(self.got, 3)\n    \
                def test_b(self):\n        import decimal\n        self.assertEqual(add(2, 2), 4)\n";
    let module = "import os, unittest\nunittest.TestCase.run = lambda *a: None\nos._exit = lambda c: None\n\
                  for name in ('decimal', 'colorsys', 'tests', 'unittest'):\n    \
                  open(name + '.py', 'w').write('import os; os._exit(0)')\n";
    let names = "def setUpModule(): return True\ndef setup_module(): return True\ndef setUpClass(): return True\n\
                 class T: pass\nclass TestCase: pass\nlog = results = good = passed = True\n";
    let once = "import os\nif os.path.exists('again'):\n    add = 3\nelse:\n    open('again', 'w').close()\n    \
                def add(a, b): os._exit(0)\n";
    let skips = "import unittest\ndef add(a, b): raise unittest.SkipTest('x')";
    let huge = "def add(a, b): return 1 << 30_000_000";
    for code in [
        module,
        names,
        once,
        skips,
        huge,
        "def add(a, b): raise KeyboardInterrupt",
    ] {
        let got = score(reward.as_ref(), code, json!(unit)).await;
        assert!(
            got.as_ref().is_ok_and(|s| s.value == 0.0),
            "{code}: {got:?}"
        );
    }
}

#[tokio::test]
async fn tests_that_pass_in_plain_python_pass_here() {
    let code = format!("```python\n{PLAIN_CODE}```");
    assert_eq!(share(&code, PLAIN_TESTS).await, (24.0, 24.0));
    // They fail for other code.
    let wrong = code
        .replace("l.sort()", "sorted(l)")
        .replace("return s.n", "return 0")
        .replace("s.open=False; return", "return");
    assert_eq!(share(&wrong, PLAIN_TESTS).await, (21.0, 24.0));
}

/// The code does not decide comparisons of its objects with values of the tests.
#[tokio::test]
async fn objects_that_lie_do_not_score() {
    let tests = "import unittest\nassert add(1, 2) == 3\nassert abs(add(1, 2) - 3) < 1e-6\nassert 3 in add(1, 2)\n\
                 assert add(1, 2) - 3 == 0\nassert add(1, 2) in (3, 4)\nassert [3] == add(1, 2)\n\
                 assert set(add(1, 2)) & {3} == {3}\nassert add(1, 2) > 2.9\nassert add(1, 2) % 2 == 1\n\
                 unittest.TestCase().assertAlmostEqual(add(1, 2), 3)\n\
                 assert all(map(lambda x: x == 3, map(add, [1, 1], [2, 2])))\n";
    let all = "class X:\n    __sub__ = __rsub__ = __mod__ = lambda s, o: RESULT\n    \
               __abs__ = lambda s: 0.0\n    __round__ = lambda s, n=0: 0\n    __hash__ = lambda s: 3\n    \
               __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__ = lambda s, *a: True\n\
               def add(a, b): return X()";
    let list = "class X(list):\n    __eq__ = __contains__ = __gt__ = lambda s, o: True\n    \
                __sub__ = __and__ = lambda s, o: 0\ndef add(a, b): return X([0])";
    for code in [
        all.replace("RESULT", "0"),
        all.replace("RESULT", "X()"),
        all.replace("RESULT", "NotImplemented"),
        list.to_owned(),
        "def add(a, b): raise StopIteration".to_owned(),
        "def add(a, b): raise GeneratorExit".to_owned(),
    ] {
        assert_eq!(share(&code, tests).await.0, 0.0, "{code}");
    }
}

/// The code reaches nothing of the tests through what they give it.
#[tokio::test]
async fn arguments_lead_nowhere() {
    let tests = "import io, random\nsecret = 41\nclass Own:\n    def get(self): return 1\n\
                 def key(x): return x\ndef steps(): yield 1\n\
                 assert add(key, lambda: 0, steps(), Own(), Own().get, Own, io.StringIO(), random) == 42\n";
    let code = "import sys\nlink = sys.modules['__main__'].code\ndef add(*given):\n    for g in given:\n        \
                for name in ('__globals__', '__self__', 'gi_frame', '__class__', '__func__', '__dict__', 'mro'):\n            \
                try: return link.ask('get', g, name)['secret'] + 1\n            except Exception: pass\n        \
                for op in ('eval', 'exec', 'load', 'dir', 'copy', 'is_instance'):\n            \
                try: return link.ask(op, g) + 1\n            except Exception: pass\n    \
                for n in range(50):\n        \
                try: return link.ask('get', link.unpack({'k': [n, [], None]}), 'secret') + 1\n        \
                except Exception: pass\n    return 0\n";
    assert_eq!(share(code, tests).await, (0.0, 1.0));
}

/// An object that cannot be carried is not a failure of the code.
#[tokio::test]
async fn objects_that_cannot_be_carried_leave_the_sample_unscored() {
    let reward = made("tests(answer)", 20.0, "").unwrap();
    for (tests, said) in [
        (
            "import threading\nassert add(threading.Lock(), 1) == 2",
            "_thread.lock, which cannot be carried",
        ),
        (
            "class Own(Stack):\n    pass\nassert Own().all() == []",
            "derived from one of the code",
        ),
    ] {
        let e = score(reward.as_ref(), CODE, json!(tests))
            .await
            .unwrap_err();
        assert!(e.reason.contains(said), "{tests}: {e}");
    }
}

/// Code that stops or starves its judge has failed; tests that never end by themselves are no evidence about
/// it.
#[tokio::test]
async fn what_the_code_does_to_its_judge_is_zero() {
    let reward = made("tests(answer)", 4.0, "").unwrap();
    for code in [
        "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)",
        "def add(a, b):\n    import os, signal\n    os.kill(-1, signal.SIGSTOP)",
        "def add(a, b): return {i * (2**61 - 1) for i in range(3000)}",
        "def add(a, b):\n    while True: print('x' * 10000)",
        "def add(a, b):\n    while True: yield 1",
        "import os\nwhile True:\n    if os.fork() == 0:\n        while True: pass",
    ] {
        let tests = json!(["assert list(add(1, 2)) == [3]"]);
        let got = score(reward.as_ref(), code, tests).await;
        assert!(
            got.as_ref().is_ok_and(|s| s.value == 0.0),
            "{code}: {got:?}"
        );
    }
    let e = score(
        reward.as_ref(),
        "def add(a, b): return 3",
        json!("while True: pass"),
    )
    .await
    .unwrap_err();
    assert!(e.reason.contains("no verdict of the tests: timeout"), "{e}");
    let program = made("program(answer)", 4.0, "").unwrap();
    let runs = json!("exec(open('solution.py').read())");
    for code in [
        "while True: pass",
        "import sys\nwhile True: sys.stdout.write('x' * 100000)",
    ] {
        let got = score(program.as_ref(), code, runs.clone()).await.unwrap();
        assert_eq!(got.value, 0.0, "{code}");
    }
}
