//! A trainer of a queue that dies between the commit of an update and the ack of its rows.

use crate::queue::Served;
use crate::resume::{done, train};
use crate::{last_line, sinew};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// First bytes of an ack on its way to the server: the name of the call, in MessagePack.
const ACK: &[u8] = b"\x81\xa3Ack";

/// Stands between a trainer and its queue: it passes everything on but acks, as long as it holds them.
struct Between {
    url: String,
    holds: Arc<AtomicBool>,
    /// An ack came and was held.
    held: Receiver<()>,
}

impl Between {
    fn new(server: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (holds, server) = (Arc::new(AtomicBool::new(true)), server.to_owned());
        let (sender, held) = sync_channel(64);
        let shared = Arc::clone(&holds);
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let (holds, sender) = (Arc::clone(&shared), sender.clone());
                let Ok(server) = TcpStream::connect(&server) else {
                    continue;
                };
                let (mut back, mut answer) =
                    (server.try_clone().unwrap(), client.try_clone().unwrap());
                thread::spawn(move || {
                    // An error is a trainer that is gone.
                    let _ = std::io::copy(&mut back, &mut answer);
                    let _ = answer.shutdown(Shutdown::Both);
                });
                thread::spawn(move || pass(client, server, &holds, &sender));
            }
        });
        Self { url, holds, held }
    }
}

/// Passes requests on until one is held.
fn pass(mut client: TcpStream, mut server: TcpStream, holds: &AtomicBool, held: &SyncSender<()>) {
    let mut seen: Vec<u8> = Vec::new();
    let mut part = [0; 65_536];
    while let Ok(count) = client.read(&mut part) {
        if count == 0 {
            return;
        }
        // The call may begin in one part and continue in the next one.
        seen.extend(&part[..count]);
        if holds.load(Ordering::SeqCst) && seen.windows(ACK.len()).any(|w| w == ACK) {
            // The test may be over.
            let _ = held.send(());
            return;
        }
        seen.drain(..seen.len().saturating_sub(ACK.len()));
        if server.write_all(&part[..count]).is_err() {
            return;
        }
    }
}

/// Rows whose lease is not over tomorrow, however long this test takes.
fn held_for_a_day(served: &Served) -> usize {
    let tomorrow = SystemTime::now() + Duration::from_secs(86_400);
    let tomorrow = tomorrow.duration_since(UNIX_EPOCH).unwrap().as_millis();
    let leased = ["--state", "leased", "--consumer", "trainer"];
    let rows = served.ask("rows", &[&leased[..], &["--limit", "1000"]].concat());
    let until = rows.lines().map(|line| {
        let row: Value = serde_json::from_str(line).unwrap();
        row["states"]["trainer"]["until_ms"].as_u64().unwrap()
    });
    until.filter(|until| u128::from(*until) > tomorrow).count()
}

/// Trained and left out, without a loss.
fn settled(last: &Value) -> (u64, u64) {
    let of = |name: &str| last["samples"][name].as_u64().unwrap();
    assert_eq!((of("trained_twice"), of("lost")), (0, 0), "{last}");
    (of("trained"), of("dropped"))
}

#[test]
fn a_crash_between_commit_and_ack_neither_loses_rows_nor_gives_them_to_another_trainer() {
    const ROWS: u64 = 3 * 64;
    let dir = tempfile::tempdir().unwrap();
    let served = Served::start(dir.path());
    let recipe = served.recipe();
    let mut collect = sinew();
    collect
        .arg("collect")
        .arg(&recipe)
        .args(["--json", "--episodes", &ROWS.to_string()]);
    last_line(
        &collect
            .arg("--run-dir")
            .arg(dir.path().join("collected"))
            .output()
            .unwrap(),
    );
    assert_eq!(served.count("trainer", "acked"), 0);
    let text = std::fs::read_to_string(&recipe).unwrap();
    let text = text.replace("steps = 24", "steps = 3");
    std::fs::write(&recipe, &text).unwrap();
    let between = Between::new(served.url().strip_prefix("http://").unwrap());
    let first = dir.path().join("first.toml");
    std::fs::write(&first, text.replace(&served.url(), &between.url)).unwrap();
    let run = dir.path().join("first");
    let mut killed = train(&first, &run, &[])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    between.held.recv().unwrap();
    killed.kill().unwrap();
    killed.wait().unwrap();
    let commits = |run: &Path| {
        let reader = sinew_store::StoreReader::open(&run.join("store")).unwrap();
        reader.trained_batches().unwrap()
    };
    let committed = commits(&run);
    assert_eq!(committed.len(), 1, "the ack came after the commit");
    let leases = committed[0].detail["consumed"]["leases"]
        .as_array()
        .unwrap();
    let rows = leases.iter().map(|l| l[1].as_array().unwrap().len());
    assert_eq!(rows.sum::<usize>(), 64, "{leases:?}");
    assert_eq!(served.count("trainer", "acked"), 0);
    // Another trainer of the same name gets only the others.
    let other = done(&recipe, &dir.path().join("other"), &[]);
    let (trained, dropped) = settled(&other);
    assert_eq!(trained + dropped, ROWS - 64, "{other}");
    assert_eq!(held_for_a_day(&served), 64);
    between.holds.store(false, Ordering::SeqCst);
    let last = done(&first, &run, &["--resume"]);
    let (trained, dropped) = settled(&last);
    assert_eq!(trained + dropped, 64, "{last}");
    assert_eq!(commits(&run).len(), 1);
    assert_eq!(served.count("trainer", "acked"), ROWS);
    assert_eq!(served.stats()["done"], ROWS);
}
