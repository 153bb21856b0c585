//! `sinew sandbox run --image`: programs of an image, in a sandbox whose root it is.

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

/// Writes an OCI layout with Debian's static busybox, whose second layer removes a file.
pub(crate) const MAKE: &str = r#"
import gzip, hashlib, io, json, os, platform, sys, tarfile
out = sys.argv[1]
blobs = os.path.join(out, "blobs", "sha256")
os.makedirs(blobs)
def layer(files, links=()):
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as t:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o755
            t.addfile(info, io.BytesIO(data))
        for name, target in links:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            t.addfile(info)
    return raw.getvalue()
def blob(data, kind):
    digest = hashlib.sha256(data).hexdigest()
    open(os.path.join(blobs, digest), "wb").write(data)
    return {"mediaType": "application/vnd.oci.image." + kind, "digest": "sha256:" + digest, "size": len(data)}
tools = ["sh", "cat", "ls", "echo", "touch", "id", "env"]
layers = [
    layer([("bin/busybox", open("/bin/busybox", "rb").read()), ("etc/motd", b"from the image\n"), ("etc/secret", b"x")],
          [("bin/" + t, "busybox") for t in tools] + [("usr", "."), ("out", "/etc/passwd")]),
    layer([("etc/.wh.secret", b""), ("data/new", b"2\n")]),
]
machine = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
config = {"os": "linux", "architecture": machine,
          "config": {"Env": ["PATH=/bin", "GREETING=hello"], "Entrypoint": ["/bin/sh", "-c"], "Cmd": ["echo $GREETING; cat /etc/motd"]},
          "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(l).hexdigest() for l in layers]}}
manifest = {"schemaVersion": 2, "config": blob(json.dumps(config).encode(), "config.v1+json"),
            "layers": [blob(gzip.compress(l), "layer.v1.tar+gzip") for l in layers]}
index = {"schemaVersion": 2, "manifests": [blob(json.dumps(manifest).encode(), "manifest.v1+json")]}
json.dump(index, open(os.path.join(out, "index.json"), "w"))
json.dump({"imageLayoutVersion": "1.0.0"}, open(os.path.join(out, "oci-layout"), "w"))
"#;

/// Runs `sinew sandbox run` in a folder.
pub(crate) fn sinew(folder: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_sinew"))
        .args(["sandbox", "run"])
        .args(args)
        .current_dir(folder)
        .output()
        .unwrap()
}

#[test]
fn programs_of_an_image_run_in_it() {
    assert!(
        Path::new("/bin/busybox").exists(),
        "no /bin/busybox: run scripts/setup.sh"
    );
    let folder = tempfile::tempdir().unwrap();
    let made = Command::new("/usr/bin/python3")
        .args(["-c", MAKE])
        .arg(folder.path().join("bb"))
        .status();
    assert!(made.unwrap().success());
    // The image's own program runs, with its environment.
    let told = sinew(folder.path(), &["--image", "bb"]);
    let text = String::from_utf8_lossy(&told.stdout).into_owned();
    let errors = String::from_utf8_lossy(&told.stderr).into_owned();
    assert_eq!(text, "hello\nfrom the image\n", "{errors}");
    assert!(folder.path().join(".cache/images").is_dir());
    // The root is the image's: nothing of the host's, nothing removed, nothing to be written.
    let script = "ls /usr/bin/python3 /etc/secret /root 2>/dev/null; cat /data/new; ls /etc; cat /out; touch /etc/x /data/y; id -u; touch /work/z && ls /work";
    let told = sinew(
        folder.path(),
        &["--image", "bb", "--strict", "--json", "--shell", script],
    );
    let result: Value = serde_json::from_slice(&told.stdout).unwrap();
    assert_eq!(result["ending"]["type"], "exited", "{result}");
    let lines: Vec<&str> = result["stdout"].as_str().unwrap().lines().collect();
    assert_eq!(
        (&lines[..2], lines.last()),
        (&["2", "motd"][..], Some(&"z")),
        "{lines:?}"
    );
    assert_ne!(lines[2], "0", "not root");
    let errors = result["stderr"].as_str().unwrap();
    assert_eq!(
        errors.matches("Read-only file system").count(),
        2,
        "{errors}"
    );
    assert!(errors.contains("can't open '/out'"), "{errors}");
    // Its words, another's, and what is not an image.
    let told = sinew(folder.path(), &["--image", "bb", "--", "echo", "a", "b"]);
    assert_eq!(told.stdout, b"a b\n");
    let told = sinew(folder.path(), &["--image", "bb", "--code", "print(1)"]);
    let errors = String::from_utf8_lossy(&told.stderr).into_owned();
    assert!(errors.contains("the image has no python3"), "{errors}");
    let told = sinew(folder.path(), &["--image", "none", "--shell", "ls"]);
    let errors = String::from_utf8_lossy(&told.stderr).into_owned();
    assert!(
        errors.contains("none is no image") && errors.contains("docker save"),
        "{errors}"
    );
    std::fs::write(folder.path().join("text"), "a:secret\n".repeat(99)).unwrap();
    let told = sinew(folder.path(), &["--image", "text", "--shell", "ls"]);
    let errors = String::from_utf8_lossy(&told.stderr).into_owned();
    assert!(
        errors.contains("text is no image") && !errors.contains("secret"),
        "{errors}"
    );
    let told = sinew(
        folder.path(),
        &["--image", "bb", "--level", "wasm", "--code", "1"],
    );
    let errors = String::from_utf8_lossy(&told.stderr).into_owned();
    assert!(errors.contains("roots of its own"), "{errors}");
}

/// Output of `sinew check` for a recipe whose tasks name images.
fn checked(folder: &Path, row: &str, sandbox: &str) -> String {
    let class = "from sinew import Env\n\nclass E(Env):\n    def reward(self, task):\n        return True\n";
    std::fs::write(folder.join("mine.py"), class).unwrap();
    let rows: String = (0..40)
        .map(|n| format!("{{\"prompt\": \"p{n}\", {row}}}\n"))
        .collect();
    std::fs::write(folder.join("rows.jsonl"), rows).unwrap();
    let recipe = format!(
        "model = {{ type = \"scratch\", d_model = 32, layers = 1, heads = 2, kv_heads = 1, d_ff = 64 }}\n\
         tasks = \"rows.jsonl\"\n[env]\ntype = \"python\"\nmodule = \"mine.py:E\"\nworkers = 1\n\
         [algorithm]\ntype = \"grpo\"\n[sandbox]\n{sandbox}\n"
    );
    std::fs::write(folder.join("r.toml"), recipe).unwrap();
    let mut check = Command::new(env!("CARGO_BIN_EXE_sinew"));
    let told = check
        .args(["check", "r.toml"])
        .current_dir(folder)
        .output()
        .unwrap();
    assert_ne!(told.status.code(), Some(0), "{row} {sandbox}");
    [told.stdout, told.stderr]
        .map(|text| String::from_utf8_lossy(&text).into_owned())
        .concat()
}

#[test]
fn images_of_tasks_are_those_that_the_recipe_names() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("root")).unwrap();
    let one = "images = { one = \"root\", other = \"root\" }";
    for (row, sandbox, said) in [
        (
            "\"image\": \"two\"",
            one,
            &["image = \"two\"", "no such image; allowed: one, other;"][..],
        ),
        ("\"image\": 7", one, &["image = 7", "allowed: one, other;"]),
        (
            "\"image\": \"one\"",
            one,
            &["image \"one\" has no /usr/bin/python3"],
        ),
        (
            "\"image\": \"one\"",
            "images = { one = \"nowhere\" }",
            &["sandbox.images.one", "nowhere is no image"],
        ),
        (
            "\"image\": \"one\"",
            "images = { \"a b\" = \"root\" }",
            &["sandbox.images = \"a b\"", "allowed: names of 1 to 128"],
        ),
    ] {
        let text = checked(folder.path(), row, sandbox);
        for part in said {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
