//! Rewards that run code, in real sandboxes of the process level: equivalence, unit tests, programs,
//! forgeries.

use crate::sample;
use serde_json::{Value, json};
use sinew_env::{Reward, Sandboxes, Score, Unscored};
use sinew_reward::{BuildConfig, TermSpec, build};
use sinew_sandbox::{
    ProcessConfig, ProcessProvider, Protection, Sandbox, SandboxError, SandboxFuture,
    SandboxProvider, SandboxSpec,
};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// A reward by name, with a deadline in seconds; `path` is searched for Python.
pub(crate) fn made(name: &str, seconds: f64, path: &str) -> Result<Arc<dyn Reward>, String> {
    made_on(Arc::new(started()), name, seconds, path)
}

fn started() -> ProcessProvider {
    let search = std::env::var("PATH").unwrap();
    ProcessProvider::start(ProcessConfig::new(&search)).unwrap()
}

/// The same with other sandboxes.
fn made_on(
    provider: Arc<dyn SandboxProvider>,
    name: &str,
    seconds: f64,
    path: &str,
) -> Result<Arc<dyn Reward>, String> {
    let search = std::env::var("PATH").unwrap();
    let config = BuildConfig {
        made: BTreeMap::new(),
        columns: vec![vec!["answer".to_owned()]],
        sandboxes: Some(Sandboxes {
            provider,
            spec: SandboxSpec::default(),
            images: BTreeMap::new(),
            machines: None,
            user: None,
        }),
        spec: SandboxSpec::default(),
        workers: 1,
        score_timeout: Duration::from_secs(60),
        folder: Path::new("."),
        python: "python3",
        search_path: &format!("{path}:{search}"),
    };
    let term = TermSpec {
        name,
        weight: 1.0,
        clip: None,
        timeout: Some(Duration::from_secs_f64(seconds)),
        pairs: None,
    };
    let rewards = build(&[term], &config).map_err(|e| e.to_string())?;
    Ok(Arc::new(rewards.single))
}

pub(crate) async fn score(
    reward: &dyn Reward,
    output: &str,
    answer: Value,
) -> Result<Score, Unscored> {
    reward
        .score(&sample(output, json!({ "answer": answer })))
        .await
}

/// Sandboxes whose host is lost the first times.
struct Losing {
    inner: ProcessProvider,
    left: AtomicUsize,
}

impl SandboxProvider for Losing {
    fn level(&self) -> &'static str {
        self.inner.level()
    }

    fn acquire<'a>(&'a self, spec: &'a SandboxSpec) -> SandboxFuture<'a, Box<dyn Sandbox>> {
        let fewer = |left: usize| left.checked_sub(1);
        let order = Ordering::SeqCst;
        if self.left.fetch_update(order, order, fewer).is_ok() {
            let lost = SandboxError::HostLost {
                host: "http://10.0.0.7:8070".into(),
                reason: "Connection refused".into(),
            };
            return Box::pin(async move { Err(lost) });
        }
        self.inner.acquire(spec)
    }

    fn protections(&self) -> Arc<Vec<Protection>> {
        self.inner.protections()
    }
}

/// A score needs another sandbox, not another sample, when the host of its sandbox goes.
#[tokio::test]
async fn a_lost_host_costs_no_score_until_hosts_are_lost_again_and_again() {
    for (losses, is_scored) in [(2, true), (3, false)] {
        let losing = Losing {
            inner: started(),
            left: AtomicUsize::new(losses),
        };
        let reward = made_on(Arc::new(losing), "program(answer)", 60.0, "").unwrap();
        let got = score(
            reward.as_ref(),
            "x = 1",
            json!("assert open('solution.py').read()"),
        )
        .await;
        match got {
            Ok(score) => assert!(is_scored && score.value == 1.0, "{losses}"),
            Err(unscored) => {
                assert!(!is_scored, "{losses}: {unscored}");
                assert!(unscored.reason.contains("10.0.0.7:8070"), "{unscored}");
            }
        }
    }
}

/// The environment of examples, made by `scripts/setup.sh`.
fn examples() -> String {
    let bin = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache/venv/bin");
    let bin = bin.canonicalize().expect("run scripts/setup.sh");
    bin.to_str().unwrap().to_owned()
}

/// The package's documentation names these forms: fractions, decimals, sets, intervals, equations, boxes.
#[tokio::test]
async fn equivalence_follows_the_package() {
    let reward = made("math(answer)", 60.0, &examples()).unwrap();
    for (answer, output, value) in [
        ("${1,3} \\cup {2,4}$", "so ${1,2,3,4}$", 1.0),
        ("$\\frac{1}{2}$", "The answer is 0.5", 1.0),
        ("1/2", "Therefore $\\boxed{0.5}$.", 1.0),
        ("42", "The answer is $\\boxed{43}$", 0.0),
        ("$x^2+2x+1$", "$(x+1)^2$", 1.0),
        ("50%", "0.5", 1.0),
        ("1,000", "1000", 1.0),
        ("$(1,2)$", "$[1,2]$", 0.0),
        ("5", "$x=5$", 1.0),
        ("$\\sqrt{8}$", "$2\\sqrt{2}$", 1.0),
        ("10", "I have no idea", 0.0),
        ("10", "", 0.0),
    ] {
        let got = score(reward.as_ref(), output, json!(answer)).await;
        let got = got.unwrap_or_else(|e| panic!("{answer}: {e}"));
        assert_eq!(got.value, value, "{answer}: {output}");
    }
    let number = score(reward.as_ref(), "0.25", json!(0.25)).await.unwrap();
    assert_eq!(number.value, 1.0);
    let words = score(reward.as_ref(), "1", json!("many"))
        .await
        .unwrap_err();
    assert!(words.reason.contains("math-verify can read"), "{words}");
}

/// An expression that no computer can write down is not an answer.
#[tokio::test]
async fn hostile_expressions_are_wrong() {
    let reward = made("math(answer)", 5.0, &examples()).unwrap();
    let tower = "$9^{9^{9^{9}}}$";
    let huge = score(reward.as_ref(), tower, json!("42")).await.unwrap();
    assert_eq!(huge.value, 0.0);
    // The next sample has a worker.
    let next = score(reward.as_ref(), "42", json!("42")).await.unwrap();
    assert_eq!(next.value, 1.0);
}

#[tokio::test]
async fn a_missing_package_is_named_with_the_command() {
    // The Python of the system has no packages of the project.
    let error = made("math(answer)", 2.0, "/usr/bin")
        .map(|_| ())
        .unwrap_err();
    assert!(error.contains("pip install math-verify==0.9.0"), "{error}");
}

const ADD: &str = "Here:\n```python\ndef add(a, b):\n    return a + b\n\nclass Stack:\n    def __init__(self):\n        \
                   self.items = []\n    def push(self, x):\n        self.items.append(x)\n    def all(self):\n        \
                   return tuple(self.items)\n\ndef bad():\n    raise ValueError('x')\n```\n";

#[tokio::test]
async fn tests_are_asserts_functions_or_classes() {
    let reward = made("tests(answer)", 60.0, "").unwrap();
    let unit = "import unittest\nfrom solution import add, bad\nclass T(unittest.TestCase):\n    \
                def test_add(self): self.assertEqual(add(1, 1), 2)\n    def test_bad(self):\n        \
                with self.assertRaises(ValueError): bad()\n    def test_wrong(self): self.assertEqual(add(1, 1), 3)\n";
    for (tests, passed, total) in [
        (
            json!(["assert add(1, 2) == 3", "assert add(1, 2) == 4"]),
            1.0,
            2.0,
        ),
        (
            json!("s = Stack()\ns.push(4)\nassert s.all() == (4,)"),
            2.0,
            2.0,
        ),
        (
            json!("def check(f):\n    assert f([1], [2]) == [1, 2]\ncheck(add)"),
            1.0,
            1.0,
        ),
        (
            json!(
                "def test_a():\n    assert add(1, 2) == 3\ndef test_b():\n    assert gone(1) == 3"
            ),
            1.0,
            2.0,
        ),
        (json!(unit), 2.0, 3.0),
    ] {
        let got = score(reward.as_ref(), ADD, tests.clone()).await;
        let got = got.unwrap_or_else(|e| panic!("{tests}: {e}"));
        assert_eq!(got.value, passed / total, "{tests}");
        assert_eq!(got.parts["reward/tests/tests"], total, "{tests}");
    }
    for (tests, said) in [
        (json!("assert ("), "they are no Python"),
        (json!([]), "allowed: tests in Python"),
        (json!(7), "allowed: tests in Python"),
    ] {
        let e = score(reward.as_ref(), ADD, tests).await.unwrap_err();
        assert!(e.reason.contains(said), "{e}");
    }
}

/// Right code, in the shapes that models write around it.
#[tokio::test]
async fn code_is_found_in_any_shape_of_an_answer() {
    let reward = made("tests(answer)", 60.0, "").unwrap();
    let code = "def add(a, b):\n    return a + b\n";
    let indented = code.replace('\n', "\n  ");
    for output in [
        format!("```python\n{code}```\nUse it so:\n```python\nprint(add(1, 2))\n```"),
        format!("```python\n{code}```\nIt prints:\n```\n3\n```"),
        format!("```python\n{code}```\n```bash\npython add.py\n```"),
        format!("```python\n{code}```\nAll done.\n```"),
        format!("Here:\n```python\n{code}"),
        format!("```python3.12\n{code}```"),
        format!("```python title=\"add.py\"\n{code}```"),
        format!("~~~python\n{code}~~~"),
        format!("- so:\n  ```python\n  {indented}```"),
        code.to_owned(),
    ] {
        let got = score(reward.as_ref(), &output, json!("assert add(1, 2) == 3"));
        let got = got.await.unwrap_or_else(|e| panic!("{output}: {e}"));
        assert_eq!(got.value, 1.0, "{output}");
        assert!(got.parts.contains_key("reward/tests/blocks"), "{got:?}");
    }
}

/// Each of these would pass if the code could report that it passed. None may score.
#[tokio::test]
async fn forged_success_does_not_score() {
    let reward = made("tests(answer)", 20.0, "").unwrap();
    let equal = "class X(int):\n    def __eq__(self, o): return True\n    def __ne__(self, o): return False\n    \
                 def __hash__(self): return 3\ndef add(a, b): return X(0)";
    let objects = "class X:\n    def __eq__(self, o): return True\ndef add(a, b): return X()";
    let patches = "import builtins, unittest, sys\nunittest.TestCase.assertEqual = lambda *a: None\n\
                   builtins.AssertionError = Exception\nsys.modules['unittest'] = None\ndef add(a, b): return 0";
    let writes = "import os\nline = '{\"secret\": \"\", \"passed\": 1, \"total\": 1}\\n'\n\
                  for p in os.listdir('/proc'):\n    for fd in range(30):\n        try: open(f'/proc/{p}/fd/{fd}', 'w').write(line)\n        \
                  except Exception: pass\nfor name in ('report.json', 'result.xml', '/tmp/report'):\n    \
                  try: open(name, 'w').write(line)\n    except OSError: pass";
    let reads = "import os\ndef add(a, b):\n    for p in os.listdir('/proc'):\n        for f in ('mem', 'fd/0', 'environ'):\n            \
                 try:\n                if p != str(os.getpid()) and p.isdigit():\n                    \
                 file = open(f'/proc/{p}/{f}', 'rb')\n                    if f == 'mem' or b'assert' in file.read(): return 3\n            \
                 except OSError: pass\n    return 0";
    for code in [
        "print('passed')\nprint('OK')",
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
        "import os, signal\nos.kill(-1, signal.SIGKILL)",
        "def add(a, b):\n    import os, signal\n    os.kill(os.getppid(), signal.SIGTERM)\n    return 3.5",
        "import os\nwhile True: os.fork()",
        "def add(a, b):\n    while True: pass",
        "def add(a, b): return 'x' * 10**9",
        "raise SystemExit",
        "def add(a, b: return",
        "def add(a, b): raise StopIteration",
        equal,
        objects,
        patches,
        writes,
        reads,
    ] {
        let output = format!("```python\n{code}\n```");
        let got = score(reward.as_ref(), &output, json!(["assert add(1, 2) == 3"])).await;
        assert!(
            got.as_ref().is_ok_and(|s| s.value == 0.0),
            "{code}: {got:?}"
        );
    }
}

#[tokio::test]
async fn a_program_decides_by_its_exit_code() {
    let reward = made("program(answer)", 60.0, "").unwrap();
    let program = "import ast, json, sys\ntask = json.load(sys.stdin)\nassert 'answer' in task\n\
                   names = [n.name for n in ast.parse(open('solution.py').read()).body]\nassert open('output.txt').read()\n\
                   sys.exit(0 if 'add' in names else 3)";
    for (output, value) in [
        (ADD, 1.0),
        ("def sub(): pass", 0.0),
        ("```\nx = (\n```", 0.0),
    ] {
        let got = score(reward.as_ref(), output, json!(program))
            .await
            .unwrap();
        assert_eq!(got.value, value, "{output}");
    }
    let hangs = made("program(answer)", 1.0, "").unwrap();
    let e = score(hangs.as_ref(), ADD, json!("while True: pass"))
        .await
        .unwrap_err();
    assert!(e.reason.contains("no verdict of the tests: timeout"), "{e}");
}

#[test]
fn rewards_that_run_code_name_one_column() {
    for (name, said) in [
        ("tests", "such as tests(answer)"),
        ("math(\"1\")", "without quotes"),
        ("program(answer, seed)", "one column"),
        ("format(\"a b\")", "names of tags"),
        ("format()", "names of tags"),
    ] {
        let e = sinew_reward::check(name).unwrap_err();
        assert!(e.to_string().contains(said), "{name}: {e}");
    }
    for name in [
        "tests(answer)",
        "math(answer)",
        "program(answer)",
        "format(\"think\", \"answer\")",
    ] {
        sinew_reward::check(name).unwrap();
    }
    let error = made("tests(gone)", 2.0, "").map(|_| ()).unwrap_err();
    assert!(error.contains("tasks have no column gone"), "{error}");
}

/// A function imports what its interpreter has: here the folder of a virtual environment.
#[tokio::test]
async fn functions_run_with_the_interpreter_that_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let found = std::process::Command::new("python3")
        .args(["-m", "venv", "--without-pip", "env"])
        .current_dir(dir.path())
        .status()
        .unwrap();
    assert!(found.success());
    let library = dir.path().join("env/lib");
    let version = library.read_dir().unwrap().next().unwrap().unwrap().path();
    std::fs::write(version.join("site-packages/only_here.py"), "value = 0.5").unwrap();
    std::fs::write(
        dir.path().join("mine.py"),
        "import only_here\ndef f(output): return only_here.value",
    )
    .unwrap();
    std::fs::set_permissions(
        dir.path(),
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )
    .unwrap();
    let python = dir.path().join("env/bin/python3");
    for (python, right) in [("python3", false), (python.to_str().unwrap(), true)] {
        let search = std::env::var("PATH").unwrap();
        let config = BuildConfig {
            made: BTreeMap::new(),
            columns: vec![vec!["answer".to_owned()]],
            sandboxes: None,
            spec: SandboxSpec::default(),
            workers: 1,
            score_timeout: Duration::from_secs(60),
            folder: dir.path(),
            python,
            search_path: &search,
        };
        let term = TermSpec {
            name: "mine.py:f",
            weight: 1.0,
            clip: None,
            timeout: None,
            pairs: None,
        };
        match build(&[term], &config) {
            Ok(rewards) => {
                let got = score(&rewards.single, "x", json!("y")).await.unwrap();
                assert_eq!((got.value, right), (0.5, true));
            }
            Err(e) => assert!(!right && e.to_string().contains("only_here"), "{e}"),
        }
    }
}
