//! Files of sandboxes: quota and archives.

use super::*;

#[tokio::test]
async fn removed_files_count_while_they_are_open() {
    let provider = provider();
    let mut place = sandbox(&provider).await;
    let code = "import os\nheld = []\ntry:\n    while len(held) < 50:\n        f = open('f', 'wb'); held.append(f); f.write(b'x' * (1 << 20)); f.flush(); os.remove('f')\nexcept OSError as e: print(len(held), e.strerror)\nheld[0].close()\nopen('g', 'wb').write(b'x' * (1 << 20)); os.remove('g')\nfor f in held[1:]:\n    try: f.close()\n    except OSError: pass\nopen('g', 'wb').write(b'x' * (15 << 20))";
    let result = run(&mut place, python(code)).await;
    let out = String::from_utf8_lossy(&result.stdout).into_owned();
    assert_eq!(
        out,
        "17 No space left on device\n",
        "{}",
        String::from_utf8_lossy(&result.stderr)
    );
    assert_eq!(result.ending, OK);
}

#[tokio::test]
async fn archives_can_be_used_at_other_levels() {
    let process = ProcessProvider::start(ProcessConfig::new("")).unwrap();
    let wasm = provider();
    let levels: [&dyn SandboxProvider; 2] = [&process, &wasm];
    let make = "import os; os.makedirs('a/b'); open('a/b/c', 'w').write('x' * 999); open('a.txt', 'w').write('y')";
    let mut archives = Vec::new();
    for level in levels {
        let mut place = level.acquire(&SandboxSpec::default()).await.unwrap();
        run(&mut place, python(make)).await;
        let snapshot = place.snapshot().await.unwrap();
        archives.push(level.export(&snapshot).await.unwrap());
    }
    assert_eq!(archives[0], archives[1]);
    for level in levels {
        assert!(level.import(&archives[0], 500).await.is_err());
        let snapshot = level.import(&archives[0], 1 << 20).await.unwrap();
        assert_eq!(level.export(&snapshot).await.unwrap(), archives[0]);
        let spec = SandboxSpec::default();
        let mut fork = level.fork(&spec, &snapshot).await.unwrap();
        let look = run(&mut fork, python("print(len(open('a/b/c').read()))")).await;
        assert_eq!(text(&look.stdout), "999\n");
    }
}
