//! Episodes in images that their tasks name.

use crate::support::{calls, folder, task};
use serde_json::{Value, json};
use sinew_bridge::{
    PythonCode, PythonEnvFactory, PythonWorkers, StartError, Target, TargetKind, TaskImages,
    WorkersConfig,
};
use sinew_env::{Env, EnvError, EnvFactory, TaskImage};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Says which image it is in, and tries to change it.
const WHERE: &str = r#"
import os
from sinew import Env, tool

class E(Env):
    def start(self, task):
        pass

    @tool
    def look(self):
        try:
            which = open("/etc/which").read()
        except OSError:
            which = "none"
        try:
            open("/etc/which", "w").write("changed")
            return which + " changed"
        except OSError:
            return which + " " + os.environ.get("FLAVOUR", "plain")

    def reward(self, task):
        return True
"#;

/// Copies the interpreter of the host, its library, git, and what they are linked to.
const COPY: &str = r#"
set -e
python=$(readlink -f /usr/bin/python3)
library=$(/usr/bin/python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
mkdir -p "$1/usr/bin" "$1$library" "$1/etc" "$1/bin" "$1/tmp" "$1/work" "$1/proc" "$1/dev"
cp "$python" "$1/usr/bin/python3"
cp -L /usr/bin/git "$1/usr/bin/git"
cp -r "$library/." "$1$library/"
rm -rf "$1$library/test" "$1$library/__pycache__"
{ ldd "$python" /usr/bin/git; ldd "$library"/lib-dynload/*.so; } | grep -o '/[^ ]*\.so[^ )]*' | grep -v dynload | sort -u | while read -r file; do
    mkdir -p "$1$(dirname "$file")"
    cp -L "$file" "$1$file"
done
chmod -R a+rX "$1"
"#;

/// Roots of two images with an interpreter, and one without.
fn roots(base: &Path) -> TaskImages {
    let first = base.join("first");
    let done = Command::new("/bin/sh")
        .args(["-c", COPY, "sh"])
        .arg(&first)
        .status()
        .unwrap();
    assert!(done.success());
    let second = base.join("second");
    let mut copy = Command::new("cp");
    let copied = copy.arg("-al").arg(&first).arg(&second).status().unwrap();
    assert!(copied.success());
    let image = |name: &str, root: &Path| {
        std::fs::write(root.join("etc/which"), name).unwrap();
        let root = root.to_path_buf();
        let env = vec![("FLAVOUR".to_owned(), format!("of {name}"))];
        (name.to_owned(), TaskImage { root, env })
    };
    TaskImages {
        images: [image("first", &first), image("second", &second)].into(),
        python: String::new(),
    }
}

/// One worker of the class above, with images.
fn factory(base: &Path, images: TaskImages, wait_s: u64) -> Result<PythonEnvFactory, StartError> {
    std::fs::write(base.join("user.py"), WHERE).unwrap();
    worker(
        Target::parse("user.py:E", TargetKind::Env, base)?,
        images,
        wait_s,
    )
}

/// One worker of a class, with images.
fn worker(target: Target, images: TaskImages, wait_s: u64) -> Result<PythonEnvFactory, StartError> {
    let code = PythonCode::find(&[target], "python3", &std::env::var("PATH").unwrap())?;
    let mut config = WorkersConfig::new(code.process_provider(2)?);
    config.workers = 1;
    config.sessions_per_worker = 1;
    config.startup_timeout = Duration::from_secs(wait_s);
    config.images = images;
    PythonEnvFactory::new(PythonWorkers::start(config, code)?, 0, "user.py:E")
}

/// An episode that has begun.
async fn begun(factory: &PythonEnvFactory, data: Value) -> Result<Box<dyn Env>, EnvError> {
    let mut env = factory.create(&task(data))?;
    env.reset().await?;
    Ok(env)
}

/// The class's view of its sandbox.
async fn seen(env: &mut Box<dyn Env>) -> String {
    let look = calls(vec![crate::support::call("a", "look", json!({}))]);
    let step = env.step(look).await.unwrap();
    let messages = env.format_observation(&step.observation.unwrap());
    messages.last().unwrap().content.text().into_owned()
}

#[tokio::test]
async fn an_episode_runs_in_the_image_that_its_task_names() {
    let dir = folder();
    let factory = factory(dir.path(), roots(dir.path()), 60).unwrap();
    // One worker changes from image to image, and back.
    for (data, told) in [
        (json!({"image": "first"}), "first of first"),
        (json!({"image": "second"}), "second of second"),
        (json!({"image": "first"}), "first of first"),
        (json!({}), "none plain"),
    ] {
        let mut env = begun(&factory, data.clone()).await.unwrap();
        assert_eq!(seen(&mut env).await, told, "{data}");
        env.close().await.unwrap();
    }
    // Two episodes of one image share no more than its files.
    assert_eq!(factory.capabilities().places, Some(1));
}

#[tokio::test]
async fn unknown_images_and_images_without_python_are_named() {
    let dir = folder();
    let mut images = roots(dir.path());
    let made = factory(dir.path(), images.clone(), 60).unwrap();
    for (data, told) in [
        (json!({"image": "third"}), "\"third\""),
        (json!({"image": 3}), "is 3"),
    ] {
        let error = begun(&made, data).await.err().unwrap().to_string();
        let words = [told, "task \"t0\"", "sandbox.images has no such image"];
        assert!(words.iter().all(|w| error.contains(w)), "{error}");
    }
    images.python = "/opt/python3".into();
    let error = factory(dir.path(), images.clone(), 60).err().unwrap();
    let error = error.to_string();
    assert!(
        error.contains("image \"first\" has no /opt/python3"),
        "{error}"
    );
    images.python.clear();
    let empty = dir.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    let root = TaskImage {
        root: empty,
        env: Vec::new(),
    };
    images.images.insert("empty".into(), root);
    let error = factory(dir.path(), images, 60).err().unwrap().to_string();
    assert!(
        error.contains("image \"empty\" has no /usr/bin/python3"),
        "{error}"
    );
}

#[tokio::test]
async fn an_episode_waits_for_a_worker_that_runs_another_image() {
    let dir = folder();
    let factory = factory(dir.path(), roots(dir.path()), 12).unwrap();
    let mut first = begun(&factory, json!({"image": "first"})).await.unwrap();
    let error = begun(&factory, json!({"image": "second"})).await;
    let error = error.err().unwrap().to_string();
    assert!(error.contains("all 1 workers run other images"), "{error}");
    let (second, ()) = tokio::join!(begun(&factory, json!({"image": "second"})), async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        first.close().await.unwrap();
    });
    let mut second = second.unwrap();
    assert_eq!(seen(&mut second).await, "second of second");
    second.close().await.unwrap();
}

/// A row in the form of SWE-bench, whose repository is in its image.
fn row(image: &str) -> Value {
    let patch = "diff --git a/tests/test_add.py b/tests/test_add.py\n--- a/tests/test_add.py\n+++ b/tests/test_add.py\n\
                 @@ -6,3 +6,6 @@\n class T(unittest.TestCase):\n     def test_zero(self):\n\
                 \x20        self.assertEqual(add(0, 0), 0)\n+\n+    def test_one(self):\n\
                 +        self.assertEqual(add(1, 1), 2)\n";
    json!({
        "instance_id": "add__add-1", "problem_statement": "add subtracts", "test_patch": patch, "image": image,
        "FAIL_TO_PASS": ["test_one (tests.test_add.T.test_one)"],
        "PASS_TO_PASS": ["test_zero (tests.test_add.T.test_zero)"],
    })
}

#[tokio::test]
async fn a_row_of_swe_bench_is_repaired_in_its_image() {
    let dir = folder();
    let images = roots(dir.path());
    let test = "import unittest\n\nfrom add import add\n\n\nclass T(unittest.TestCase):\n    def test_zero(self):\n        \
                self.assertEqual(add(0, 0), 0)\n";
    for image in images.images.values() {
        let tests = image.root.join("testbed/tests");
        std::fs::create_dir_all(&tests).unwrap();
        std::fs::write(tests.join("__init__.py"), "").unwrap();
        std::fs::write(tests.join("test_add.py"), test).unwrap();
        let add = "def add(a, b):\n    return a - b\n";
        std::fs::write(image.root.join("testbed/add.py"), add).unwrap();
    }
    let history = images.images["second"].root.join("testbed/.git");
    std::fs::create_dir(history).unwrap();
    let target = Target::parse("sinew.bridges.swe:Swe", TargetKind::Env, dir.path()).unwrap();
    let options = [("runner".to_owned(), json!("unittest"))];
    let target = target.with_options(options.into_iter().collect());
    let factory = worker(target, images, 60).unwrap();
    for (new, reward) in [("a + b", 1.0), ("2", 0.0)] {
        let mut env = begun(&factory, row("first")).await.unwrap();
        let edit = json!({"path": "add.py", "old": "a - b", "new": new});
        let edit = calls(vec![crate::support::call("a", "edit_file", edit)]);
        env.step(edit).await.unwrap();
        let submit = calls(vec![crate::support::call("b", "submit", json!({}))]);
        let step = env.step(submit).await.unwrap();
        assert!(step.done);
        let outcome = step.outcome.unwrap();
        assert_eq!(outcome.reward, reward, "{new}: {outcome:?}");
        env.close().await.unwrap();
    }
    let error = begun(&factory, row("second")).await.err().unwrap();
    assert!(
        error
            .to_string()
            .contains("/testbed/.git is in image second"),
        "{error}"
    );
}
