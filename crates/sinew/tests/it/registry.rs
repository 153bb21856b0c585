//! Images of a registry: pulled, run, checked, and offered by a server of sandboxes.

use crate::Running;
use crate::images::{MAKE, sinew};
use crate::queue::until;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

/// Puts the image of a layout into a registry.
const PUSH: &str = r#"
import json, os, sys, urllib.request
folder, base, name, tag = sys.argv[1:]
def send(method, url, data, kind="application/octet-stream"):
    request = urllib.request.Request(url, data=data, method=method, headers={"Content-Type": kind})
    return urllib.request.urlopen(request)
blobs = os.path.join(folder, "blobs", "sha256")
for blob in os.listdir(blobs):
    place = send("POST", f"{base}/v2/{name}/blobs/uploads/", b"").headers["Location"]
    send("PUT", f"{place}&digest=sha256:{blob}", open(os.path.join(blobs, blob), "rb").read())
digest = json.load(open(os.path.join(folder, "index.json")))["manifests"][0]["digest"]
manifest = open(os.path.join(blobs, digest[7:]), "rb").read()
send("PUT", f"{base}/v2/{name}/manifests/{tag}", manifest, "application/vnd.oci.image.manifest.v1+json")
print(digest)
"#;

/// Debian's registry on a free port of loopback.
struct Registry {
    _child: Running,
    host: String,
}

impl Registry {
    fn start(folder: &Path) -> Self {
        let config = serde_json::json!({
            "version": 0.1, "storage": { "filesystem": { "rootdirectory": folder.join("registry") } },
            "http": { "addr": "127.0.0.1:0" },
        });
        std::fs::write(folder.join("config.yml"), config.to_string()).unwrap();
        let mut command = Command::new("docker-registry");
        command.arg("serve").arg(folder.join("config.yml"));
        let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
        let mut child = child.expect("no docker-registry: run scripts/setup.sh");
        let mut lines = BufReader::new(child.stderr.take().unwrap())
            .lines()
            .map_while(Result::ok);
        let host = lines.find_map(|line| {
            let (_, rest) = line.split_once("listening on ")?;
            Some(rest.split('"').next()?.to_owned())
        });
        // Its later output must not fill the pipe.
        std::thread::spawn(move || lines.for_each(drop));
        Self {
            _child: Running(child),
            host: host.unwrap(),
        }
    }
}

#[test]
fn programs_of_an_image_of_a_registry_run_in_it() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let layout = folder.join("bb");
    let python = |code: &str, args: &[&str]| {
        let made = Command::new("/usr/bin/python3")
            .args(["-c", code])
            .arg(&layout)
            .args(args)
            .output()
            .unwrap();
        assert!(
            made.status.success(),
            "{}",
            String::from_utf8_lossy(&made.stderr)
        );
        String::from_utf8(made.stdout).unwrap().trim().to_owned()
    };
    python(MAKE, &[]);
    let registry = Registry::start(folder);
    let digest = python(
        PUSH,
        &[&format!("http://{}", registry.host), "team/bb", "1"],
    );
    let tag = format!("registry:{}/team/bb:1", registry.host);
    let pinned = format!("registry:{}/team/bb@{digest}", registry.host);
    for image in [&tag, &pinned] {
        let told = sinew(folder, &["--image", image]);
        let errors = String::from_utf8_lossy(&told.stderr).into_owned();
        assert_eq!(told.stdout, b"hello\nfrom the image\n", "{errors}");
    }
    let told = sinew(
        folder,
        &["--level", "crun", "--image", &tag, "--", "cat", "/etc/motd"],
    );
    let errors = String::from_utf8_lossy(&told.stderr).into_owned();
    assert_eq!(told.stdout, b"from the image\n", "{errors}");
    let unpacked = std::fs::read_dir(folder.join(".cache/images"))
        .unwrap()
        .flatten();
    let unpacked = unpacked.filter(|e| e.path().is_dir()).count();
    assert_eq!(unpacked, 1, "one root for both levels and both names");
    let none = format!("registry:{}/team/bb:2", registry.host);
    assert!(crate::failure(&sinew(folder, &["--image", &none]), 2).contains("has no image"));
    assert!(
        crate::failure(&sinew(folder, &["--image", "registry:bb:1"]), 2)
            .contains("registry:HOST/NAME:TAG")
    );
    checked(folder, &tag);
    served(folder, &["--image", &pinned], "{}");
    let named = format!("team.bb-1={pinned}");
    served(
        folder,
        &["--named-image", &named],
        r#"{"image": "team.bb-1"}"#,
    );
    drop(registry);
    // A pinned image that is here needs no registry.
    assert!(sinew(folder, &["--image", &pinned]).status.success());
    needs_credentials(folder);
}

/// A registry that wants credentials: the recipe is right, and something is needed first.
fn needs_credentials(folder: &Path) {
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let name = format!("registry:{}/bb:1", closed.local_addr().unwrap());
    std::thread::spawn(move || {
        for mut stream in closed.incoming().flatten() {
            let answer = b"HTTP/1.1 401 X\r\ncontent-length: 0\r\nconnection: close\r\nwww-authenticate: Basic\r\n\r\n";
            let _ = stream
                .read(&mut [0; 4096])
                .and_then(|_| stream.write_all(answer));
        }
    });
    let refused = crate::failure(&sinew(folder, &["--image", &name, "--shell", "ls"]), 3);
    assert!(refused.contains("SINEW_REGISTRY_AUTH"), "{refused}");
}

/// `sinew check` shows the image of a recipe.
fn checked(folder: &Path, image: &str) {
    let model = crate::runs::small_folder(folder);
    let text = format!(
        "name = \"image\"\nmodel = {model:?}\nenv = {{ type = \"tool_math\" }}\nalgorithm = {{ type = \"grpo\" }}\n\
         [rollout]\ntasks_per_step = 2\nmax_context_tokens = 768\n[eval]\ntasks = 2\n[sandbox]\nimage = {image:?}\n"
    );
    std::fs::write(folder.join("r.toml"), text).unwrap();
    let mut check = Command::new(env!("CARGO_BIN_EXE_sinew"));
    let report = check
        .args(["check", "r.toml", "--json"])
        .current_dir(folder)
        .output()
        .unwrap();
    let rows = String::from_utf8(report.stdout).unwrap();
    let row = |name: &str| {
        let rows = rows
            .lines()
            .filter_map(|l| serde_json::from_str::<Value>(l).ok());
        let mut rows = rows.filter(|r| r["check"] == name);
        rows.next().unwrap_or_else(|| panic!("no row {name}"))
    };
    let detail = row("image")["detail"].to_string();
    assert!(
        detail.contains("found in .cache/images: sha256:"),
        "{detail}"
    );
    // The image is used: it has no Python.
    assert!(
        row("sandbox")["detail"].to_string().contains("no python3"),
        "{rows}"
    );
}

/// A server of sandboxes: what `asked` asks for has the image as its root, with its variables.
fn served(folder: &Path, offered: &[&str], asked: &str) {
    let mut serve = Command::new(env!("CARGO_BIN_EXE_sinew"));
    serve.args([
        "serve",
        "--sandbox-only",
        "--listen",
        "127.0.0.1:0",
        "--json",
    ]);
    let (mut child, said) = until(serve.args(offered).current_dir(folder), |_| true);
    let code = r#"
import json, sys, urllib.request
url, token, asked = sys.argv[1:]
def post(path, body):
    headers = {"Authorization": "Bearer " + token, "Content-Type": "application/json"}
    request = urllib.request.Request(url + path, data=json.dumps(body).encode(), headers=headers)
    return json.load(urllib.request.urlopen(request))
box = post("/v1/sandboxes", {"env": {"OWN": "x"}, **json.loads(asked)})["id"]
print(post(f"/v1/sandboxes/{box}/exec", {"shell": "cat /etc/motd; echo $GREETING $OWN; ls /usr/bin/python3; cat /volumes/books/a"})["stdout"])
"#;
    let told = Command::new("/usr/bin/python3")
        .args([
            "-c",
            code,
            said["url"].as_str().unwrap(),
            said["token"].as_str().unwrap(),
            asked,
        ])
        .output();
    child.kill();
    let told = told.unwrap();
    let errors = String::from_utf8_lossy(&told.stderr).into_owned();
    assert_eq!(
        String::from_utf8_lossy(&told.stdout).trim(),
        "from the image\nhello x",
        "{errors}"
    );
}
