//! The client against agents that were taken over, and the agent in a separate namespace.

use sinew_sandbox::guest::{AGENT, Guest, Setup, Stream};
use sinew_sandbox::{ExecRequest, Limits, Program, SandboxError};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

const HELLO: u8 = 1;
const STDOUT: u8 = 2;
const DATA: u8 = 4;
const ENTRY: u8 = 5;
const ENDED: u8 = 6;
const FAILED: u8 = 8;

fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![kind];
    frame.extend((payload.len() as u32).to_le_bytes());
    frame.extend(payload);
    frame
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

/// A client whose agent sends its first message, and the agent's end of the connection.
async fn pair() -> (Guest, DuplexStream) {
    let (ours, mut theirs) = tokio::io::duplex(1 << 20);
    theirs
        .write_all(&frame(HELLO, &words(&[2, 0])))
        .await
        .unwrap();
    let stream: Box<dyn Stream> = Box::new(ours);
    let within = Duration::from_secs(10);
    (Guest::greet(stream, "test", within).await.unwrap(), theirs)
}

fn request(deadline_ms: u64) -> ExecRequest {
    ExecRequest::new(
        Program::Shell("true".into()),
        Duration::from_millis(deadline_ms),
    )
}

/// Result of an execution whose agent answers with `bytes`.
async fn answered(bytes: &[u8]) -> String {
    let (mut guest, mut theirs) = pair().await;
    theirs.write_all(bytes).await.unwrap();
    let done = guest.exec(&request(5000), &[], 100, None).await;
    let error = done.unwrap_err();
    assert!(matches!(error, SandboxError::Died(_)), "{error}");
    assert!(!guest.usable());
    let again = guest.write_file("x", b"").await.unwrap_err();
    assert!(matches!(again, SandboxError::Died(_)), "{again}");
    error.to_string()
}

#[tokio::test]
async fn frames_that_break_the_rules_end_the_connection() {
    let huge = [STDOUT, 0xff, 0xff, 0xff, 0xff];
    assert!(answered(&huge).await.contains("4294967295 bytes"));
    let flood = frame(STDOUT, &[b'x'; 101]);
    assert!(answered(&flood).await.contains("more than 100 bytes"));
    for stranger in [HELLO, DATA, ENTRY, 77] {
        let why = answered(&frame(stranger, &[])).await;
        assert!(why.contains("does not belong"), "{why}");
    }
    for short in [
        frame(ENDED, &[0]),
        frame(ENDED, &[0; 400]),
        frame(FAILED, &[1]),
    ] {
        let why = answered(&short).await;
        assert!(why.contains("does not belong"), "{why}");
    }
}

#[tokio::test]
async fn an_entry_that_leaves_the_folder_is_refused() {
    for path in ["../x", "/etc/passwd", "", "a/../../b"] {
        let (mut guest, mut theirs) = pair().await;
        let mut entry = vec![0];
        entry.extend(words(&[0o644, 0]));
        entry.extend((path.len() as u32).to_le_bytes());
        entry.extend(path.as_bytes());
        entry.extend(0u32.to_le_bytes());
        theirs.write_all(&frame(ENTRY, &entry)).await.unwrap();
        let refused = guest.entries(1000).await.unwrap_err();
        assert!(refused.to_string().contains("does not belong"), "{refused}");
    }
    // More content than there may be, and content of nothing.
    for bytes in [vec![b'x'; 1001], vec![]] {
        let (mut guest, mut theirs) = pair().await;
        theirs.write_all(&frame(DATA, &bytes)).await.unwrap();
        assert!(guest.entries(1000).await.is_err());
    }
}

#[tokio::test]
async fn a_frame_that_never_ends_is_cut() {
    let (mut guest, mut theirs) = pair().await;
    theirs
        .write_all(&[STDOUT, 50, 0, 0, 0, b'x'])
        .await
        .unwrap();
    let cut = guest
        .exec(&request(1000), &[], 100, None)
        .await
        .unwrap_err();
    assert!(cut.to_string().contains("after its deadline"), "{cut}");
    assert!(!guest.usable());
    let (ours, _theirs) = tokio::io::duplex(100);
    let silent = Guest::greet(Box::new(ours), "test", Duration::from_secs(1)).await;
    assert!(silent.unwrap_err().to_string().contains("said nothing"));
}

#[tokio::test]
async fn an_agent_of_another_version_is_named() {
    let (ours, mut theirs) = tokio::io::duplex(100);
    theirs
        .write_all(&frame(HELLO, &words(&[9, 0])))
        .await
        .unwrap();
    let refused = Guest::greet(Box::new(ours), "test", Duration::from_secs(1)).await;
    assert!(refused.unwrap_err().to_string().contains("version 9"));
}

#[tokio::test]
async fn who_gives_up_half_way_breaks_the_connection() {
    let (ours, theirs) = tokio::io::duplex(64);
    let mut theirs = theirs;
    theirs
        .write_all(&frame(HELLO, &words(&[2, 0])))
        .await
        .unwrap();
    let within = Duration::from_secs(10);
    let mut guest = Guest::greet(Box::new(ours), "test", within).await.unwrap();
    // Nobody reads: the request cannot be written in whole.
    let given_up = guest.write_file("x", &[0; 4096]);
    assert!(
        tokio::time::timeout(Duration::from_millis(50), given_up)
            .await
            .is_err()
    );
    let next = guest.count().await.unwrap_err();
    assert!(next.to_string().contains("given up"), "{next}");
    let mut some = [0; 5];
    theirs.read_exact(&mut some).await.unwrap();
}

#[test]
fn the_agent_refuses_to_be_anything_but_the_first_process() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("agent");
    std::fs::write(&path, AGENT).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
    let run = |command: &mut Command| command.stdin(Stdio::null()).output().unwrap();
    let alone = run(Command::new(&path).args(["connect", "/no/such/socket"]));
    assert_eq!(alone.status.code(), Some(64));
    // The agent, when it is the first process, ends if it cannot connect.
    let first = run(Command::new("unshare")
        .args(["--pid", "--fork"])
        .arg(&path)
        .args(["connect", "/no/such/socket"]));
    assert_eq!(first.status.code(), Some(1), "{first:?}");
    assert!(String::from_utf8_lossy(&first.stderr).contains("agent:"));
}

#[tokio::test]
async fn limits_reach_the_agent() {
    let (mut guest, mut theirs) = pair().await;
    let setup = Setup {
        limits: Limits::default(),
        uid: 65_534,
        own_user: false,
        tcp: false,
        inodes: 10,
        python: None,
        warm_python: true,
        env: vec![("KEY".into(), "value".into())],
        writable_root: None,
    };
    theirs.write_all(&frame(7, &[])).await.unwrap();
    guest.set_up(&setup).await.unwrap();
    let mut head = [0; 5];
    theirs.read_exact(&mut head).await.unwrap();
    let len = u32::from_le_bytes([head[1], head[2], head[3], head[4]]);
    let mut asked = vec![0; len as usize];
    theirs.read_exact(&mut asked).await.unwrap();
    assert_eq!((head[0], &asked[..8]), (1, &words(&[65_534])[..]));
    // No interpreter: none waits.
    assert_eq!(asked[8], 0);
    let has = |text: &[u8]| asked.windows(text.len()).any(|w| w == text);
    assert!(has(b"KEY=value") && has(b"HOME=/work"));
}
