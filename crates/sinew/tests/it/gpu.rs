//! `sinew check` for GPUs that are stated or reported by a driver, and `sinew setup torch` with stand-ins for
//! `uv` and Python: nothing is downloaded.

use crate::{failure, json_lines, run_ok, sinew, small_tiny, with_changes};
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The tiny recipe with a trainer of PyTorch and further lines.
fn recipe(dir: &Path, more: &str) -> PathBuf {
    let path = dir.join("recipe.toml");
    let text = format!("{}\n[trainer]\ntype = \"torch\"\n{more}", small_tiny());
    std::fs::write(&path, text).unwrap();
    path
}

/// The same with a model of seven billion weights.
fn large(dir: &Path, more: &str) -> PathBuf {
    let path = recipe(dir, more);
    let text = std::fs::read_to_string(&path).unwrap();
    let changes = [
        ("d_model = 64", "d_model = 4096"),
        ("layers = 2", "layers = 36"),
        ("heads = 4", "heads = 32"),
        ("kv_heads = 2", "kv_heads = 8"),
        ("d_ff = 128", "d_ff = 12288"),
    ];
    std::fs::write(&path, with_changes(text, &changes)).unwrap();
    path
}

/// A program in a folder of `PATH`.
fn stand_in(dir: &Path, name: &str, script: &str) {
    let path = dir.join(name);
    std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// `PATH` with a folder before it.
fn search(dir: &Path) -> String {
    format!("{}:{}", dir.display(), std::env::var("PATH").unwrap())
}

fn check(recipe: &Path, more: &[&str]) -> Command {
    let mut command = sinew();
    command.arg("check").arg(recipe).args(more).arg("--json");
    command.env_remove("CUDA_VISIBLE_DEVICES");
    command
}

fn row(output: &Output, name: &str) -> Value {
    let text = String::from_utf8_lossy(&output.stdout);
    let rows = json_lines(&text);
    let found = rows.into_iter().find(|row| row["check"] == name);
    found.unwrap_or_else(|| panic!("no row {name}: {text}"))
}

fn detail(row: &Value) -> &str {
    row["detail"].as_str().unwrap()
}

#[test]
fn stated_gpus_are_compared_with_what_the_trainer_needs() {
    let dir = tempfile::tempdir().unwrap();
    let output = check(&large(dir.path(), ""), &["--gpus", "1x80"])
        .output()
        .unwrap();
    let told = failure(&output, 1);
    assert!(told.contains("trainer: an update needs "), "{told}");
    assert_eq!(detail(&row(&output, "gpus")), "1 GPU of 80.0 GB, as stated");
    let refused = row(&output, "trainer");
    assert!(
        detail(&refused).contains("hint: train.lora.rank = 32 ("),
        "{refused}"
    );
    let bytes = &refused["figures"]["bytes"];
    let weights = bytes["weights"].as_u64().unwrap();
    assert_eq!(bytes["moments"].as_u64().unwrap(), 2 * weights);
    assert!((27e9..29e9).contains(&(weights as f64)), "{weights}");
    // The hint is taken.
    let path = large(dir.path(), "[train.lora]\nrank = 4\n");
    let output = check(&path, &["--gpus", "1x80"]).output().unwrap();
    let fits = row(&output, "trainer");
    assert_eq!(fits["ok"], true, "{fits}");
    assert!(
        detail(&fits).contains(" of 80.0 GB at most on one rank: weights "),
        "{fits}"
    );
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    // People see the same lines.
    let told = run_ok(sinew().arg("check").arg(&path).args(["--gpus", "1x80"]));
    assert!(
        told.contains("ok    gpus         1 GPU of 80.0 GB, as stated"),
        "{told}"
    );
    assert!(told.contains("billion parameters"), "{told}");
}

#[test]
fn ranks_without_gpus_are_compared_with_the_memory_of_the_host() {
    let dir = tempfile::tempdir().unwrap();
    stand_in(dir.path(), "nvidia-smi", "echo 'no driver' >&2; exit 9");
    let path = recipe(dir.path(), "ranks = 2\n");
    let output = check(&path, &[])
        .env("PATH", search(dir.path()))
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(detail(&row(&output, "gpus")).starts_with("none: the ranks compute on the CPU"));
    let memory = row(&output, "memory");
    assert!(
        detail(&memory).contains(" on each of 2 ranks: weights "),
        "{memory}"
    );
    assert!(memory["figures"]["installed"].as_u64().unwrap() > 1 << 30);
    let path = large(dir.path(), "ranks = 64\n");
    let mut crowded = check(&path, &[]);
    let output = crowded.env("PATH", search(dir.path())).output().unwrap();
    failure(&output, 1);
    assert!(
        detail(&row(&output, "memory")).contains("; it has "),
        "{output:?}"
    );
}

#[test]
fn gpus_of_the_driver_are_taken() {
    let dir = tempfile::tempdir().unwrap();
    let table =
        "echo 'NVIDIA H100 80GB HBM3, 81559, 81000'; echo 'NVIDIA H100 80GB HBM3, 81559, 60000'";
    stand_in(dir.path(), "nvidia-smi", table);
    let path = recipe(dir.path(), "");
    let mut command = check(&path, &[]);
    let output = command.env("PATH", search(dir.path())).output().unwrap();
    let gpus = row(&output, "gpus");
    assert!(
        detail(&gpus).starts_with("2 GPUs of 85.5 GB here: NVIDIA H100 80GB HBM3"),
        "{gpus}"
    );
    assert!(
        detail(&gpus).contains("warning: other programs use up to 22.6 GB"),
        "{gpus}"
    );
    assert_eq!(row(&output, "trainer")["figures"]["ranks"], 2);
    let output = command.env("CUDA_VISIBLE_DEVICES", "0").output().unwrap();
    assert_eq!(row(&output, "trainer")["figures"]["ranks"], 1);
}

#[test]
fn gpus_without_a_trainer_of_pytorch_are_wrong_input() {
    let gpus = |recipe: &str, value: &str| {
        let mut command = sinew();
        command
            .args(["check", recipe, "--gpus", value])
            .output()
            .unwrap()
    };
    let told = failure(&gpus("recipes/tiny.toml", "8x80"), 2);
    assert!(
        told.contains("--gpus: has an effect with [trainer] type = \"torch\" only"),
        "{told}"
    );
    let told = failure(&gpus("recipes/tiny.toml", "many"), 2);
    assert!(told.contains("COUNTxGB"), "{told}");
}

/// An interpreter that reports all packages, as the real one with torch does.
const PYTHON: &str = r#"cat <<'END'
{"python": "3.12.1", "packages": {"torch": "2.9.0", "transformers": "5.0.0", "peft": "0.19.0", "safetensors": "0.8.0", "msgspec": "0.20.0", "blake3": PROBED}, "cuda": "13.0", "gpus": []}
END"#;

/// `uv` that writes down its calls and makes that interpreter; `blake3` is its version, or `null`.
fn fake_uv(dir: &Path, blake3: &str) {
    let python = PYTHON.replace("PROBED", blake3);
    let script = format!(
        "echo \"$@\" >> '{log}'\n[ \"$1\" = venv ] || exit 0\nfor last; do :; done\nmkdir -p \"$last/bin\"\n\
         echo \"#!$last/bin/python\" > \"$last/bin/torchrun\"\necho 'home = /usr' > \"$last/pyvenv.cfg\"\n\
         cat > \"$last/bin/python\" <<'PYTHON'\n#!/bin/sh\n{python}\nPYTHON\nchmod +x \"$last/bin/python\"",
        log = dir.join("log").display()
    );
    stand_in(dir, "uv", &script);
}

fn setup(dir: &Path) -> Command {
    let mut command = sinew();
    command
        .args(["setup", "torch", "--json"])
        .env("PATH", search(dir));
    // An index is named, so that a small disk of a test machine is no reason.
    command.args(["--index-url", "http://127.0.0.1:9/simple"]);
    command.env("SINEW_CACHE", dir.join("cache"));
    command
}

#[test]
fn the_environment_of_pytorch_is_made_once() {
    let dir = tempfile::tempdir().unwrap();
    fake_uv(dir.path(), "\"1.0.0\"");
    let made = setup(dir.path()).output().unwrap();
    assert_eq!(made.status.code(), Some(0), "{made:?}");
    let told = String::from_utf8_lossy(&made.stderr).into_owned();
    assert!(told.contains("uv installs torch>=2.9, "), "{told}");
    let line: Value = serde_json::from_slice(&made.stdout).unwrap();
    assert_eq!(
        (&line["made"], &line["packages"]["peft"]),
        (&true.into(), &"0.19.0".into())
    );
    let folder = dir.path().join("cache/torch");
    let script = std::fs::read_to_string(folder.join("bin/torchrun")).unwrap();
    assert_eq!(script, format!("#!{}/bin/python\n", folder.display()));
    let log = || std::fs::read_to_string(dir.path().join("log")).unwrap();
    let calls = log();
    assert!(
        calls.contains("--index-url http://127.0.0.1:9/simple torch>=2.9\n"),
        "{calls}"
    );
    assert!(calls.contains("transformers>=5.0 peft>=0.19"), "{calls}");
    let again = setup(dir.path()).output().unwrap();
    let line: Value = serde_json::from_slice(&again.stdout).unwrap();
    assert_eq!(line["made"], false);
    let versions = |text: &str| text.matches("pip install").count();
    assert_eq!(versions(&log()), versions(&calls));
    // The doctor finds it.
    let mut doctor = sinew();
    doctor
        .args(["doctor", "--torch", "--json"])
        .env("PATH", search(dir.path()));
    doctor
        .env("SINEW_CACHE", dir.path().join("cache"))
        .env_remove("SINEW_TORCH_PYTHON");
    let output = doctor.output().unwrap();
    let packages = row(&output, "packages");
    assert!(
        detail(&packages).contains("transformers 5.0.0"),
        "{packages}"
    );
    assert!(detail(&row(&output, "interpreter")).contains("cache/torch/bin/python"));
}

#[test]
fn an_environment_that_is_not_whole_is_not_left_behind() {
    let dir = tempfile::tempdir().unwrap();
    fake_uv(dir.path(), "null");
    let told = failure(&setup(dir.path()).output().unwrap(), 3);
    assert!(told.contains("blake3 cannot be imported"), "{told}");
    let cache = dir.path().join("cache");
    assert!(!cache.join("torch").exists() && !cache.join("torch.part").exists());
    stand_in(
        dir.path(),
        "uv",
        "[ \"$1\" = --version ] || { echo 'no network' >&2; exit 2; }",
    );
    let told = failure(&setup(dir.path()).output().unwrap(), 3);
    assert!(
        told.contains("no network") && told.contains("uv venv"),
        "{told}"
    );
    assert!(!cache.join("torch").exists());
    // A folder of others is not touched.
    std::fs::create_dir_all(cache.join("torch")).unwrap();
    std::fs::write(cache.join("torch/notes"), "mine").unwrap();
    let told = failure(&setup(dir.path()).output().unwrap(), 2);
    assert!(told.contains("did not make it"), "{told}");
    assert!(cache.join("torch/notes").exists());
}
