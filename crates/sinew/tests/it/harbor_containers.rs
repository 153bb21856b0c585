//! Task folders of Harbor in containers: an image that is built, a writable root, a separate verifier.

use crate::{last_line, sinew};
use std::fs;
use std::path::Path;

/// Programs of busybox that the tasks use.
const TOOLS: [&str; 12] = [
    "sh", "cat", "chmod", "cp", "echo", "env", "head", "id", "ls", "mkdir", "rm", "tr",
];

/// A folder of an image without a base: Debian's static busybox.
fn image(folder: &Path) {
    let bin = folder.join("root/bin");
    fs::create_dir_all(&bin).unwrap();
    fs::create_dir_all(folder.join("root/app")).unwrap();
    fs::create_dir_all(folder.join("root/tmp")).unwrap();
    fs::copy("/bin/busybox", bin.join("busybox"))
        .expect("no /bin/busybox: run scripts/setup.sh installs it");
    for tool in TOOLS {
        std::os::unix::fs::symlink("busybox", bin.join(tool)).unwrap();
    }
    fs::write(folder.join("root/app/in.txt"), "in\n").unwrap();
    let file = "FROM scratch\nENV PATH=/bin\nCOPY root/ /\nWORKDIR /app\n";
    fs::write(folder.join("Dockerfile"), file).unwrap();
}

fn file(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

#[test]
fn tasks_with_images_are_solved_by_their_solutions_only() {
    let dir = tempfile::tempdir().unwrap();
    let tasks = dir.path().join("tasks");
    for (name, keys) in [
        ("shared", ""),
        (
            "separate",
            "artifacts = [\"/etc/out.txt\"]\n[verifier]\nenvironment_mode = \"separate\"\n",
        ),
        ("made", ""),
    ] {
        let task = tasks.join(name);
        image(&task.join("environment"));
        if name == "made" {
            // Builders do not make the last folder.
            let path = task.join("environment/Dockerfile");
            let text = fs::read_to_string(&path).unwrap();
            file(&path, &format!("{text}WORKDIR /made/here\n"));
        }
        file(&task.join("task.toml"), keys);
        file(
            &task.join("instruction.md"),
            "Copy in.txt to /etc/out.txt.\n",
        );
        file(
            &task.join("solution/solve.sh"),
            "#!/bin/sh\ncp /app/in.txt /etc/out.txt\n",
        );
        let test = "#!/bin/sh\nr=0\n[ \"$(cat /etc/out.txt)\" = in ] && [ ! -e /solution/solve.sh ] && r=1\n\
                    [ \"$(id -u)\" = 0 ] || r=0\necho $r >/logs/verifier/reward.txt\n";
        file(&task.join("tests/test.sh"), test);
    }
    let mut check = sinew();
    check.current_dir(dir.path());
    check.args([
        "env",
        "check",
        "tasks",
        "--all",
        "--sessions",
        "2",
        "--json",
    ]);
    let report = last_line(&check.output().unwrap());
    assert_eq!(report["level"], "container", "{report}");
    assert_eq!(report["passed"], 3, "{report}");
    assert_eq!(report["failed"], 0, "{report}");
}
