//! Lost answers, restarts, wrong tokens, bodies that are not calls, waits.

use super::{LIMITS, PATIENCE, RUNTIME, TOKEN, client, keys, row, serve, trainer};
use sinew_queue::HttpQueue;
use sinew_store::StoreError;
use sinew_store::queue::{
    AckedRow, PutOutcome, Queue, RowRequest, RowSelection, RowState, Sample, put_within,
};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

fn ask(rows: usize) -> RowRequest {
    RowRequest {
        consumer: "trainer".into(),
        holder: "tests".into(),
        ttl_ms: 1000,
        take: RowSelection::Sample(Sample::rows(rows)),
    }
}

/// A way to a server that takes each request there and, of every connection, loses the first answer.
fn lossy(to: std::net::SocketAddr) -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let mut lose = true;
        for taken in listener.incoming() {
            let (mut taken, mut there) = (taken.unwrap(), TcpStream::connect(to).unwrap());
            let (mut from, mut onward) = (taken.try_clone().unwrap(), there.try_clone().unwrap());
            let lost = lose;
            lose = !lose;
            std::thread::spawn(move || {
                // Ends with the connection.
                let _ = std::io::copy(&mut from, &mut onward);
            });
            let mut answer = [0; 16 << 10];
            if lost {
                // The call was done: its answer is here, and goes no further.
                let _ = there.read(&mut answer).unwrap();
                let _ = taken.shutdown(std::net::Shutdown::Both);
                continue;
            }
            // One answer a connection, so that the next call loses its first again.
            let n = there.read(&mut answer).unwrap();
            taken.write_all(&answer[..n]).unwrap();
            let _ = taken.shutdown(std::net::Shutdown::Both);
        }
    });
    address
}

#[test]
fn a_call_whose_answer_is_lost_is_done_once() {
    let directory = tempfile::tempdir().unwrap();
    let now = Arc::new(AtomicU64::new(0));
    let server = serve(&directory.path().join("q.sqlite"), LIMITS, 0, &now);
    let direct = client(&server);
    direct.join(&trainer()).unwrap();
    let way = lossy(server.address());
    let queue = HttpQueue::new(&format!("http://{way}"), TOKEN, PATIENCE).unwrap();
    // The second answer is that of the first call, not what a second call would get.
    let put = queue.put(&[row("a", 1), row("b", 1), row("c", 1)]).unwrap();
    assert_eq!(put, [PutOutcome::New; 3]);
    let loan = queue.lease(&ask(2), 0).unwrap();
    assert_eq!(keys(&loan), ["a", "b"]);
    assert_eq!(loan.rows[0].attempt, 1);
    assert_eq!(direct.stats().unwrap().of("trainer").leased, 2);
    let lease = loan.lease.unwrap();
    let done = [AckedRow::of("a")];
    assert_eq!(queue.ack("trainer", lease, &done).unwrap().changed, 1);
    let back = queue.fail("trainer", lease, &["b".into()], "no").unwrap();
    assert_eq!((back.changed, back.lost.len()), (1, 0));
    assert_eq!(queue.remove(&["c".into()]).unwrap(), 1);
    let stats = direct.stats().unwrap();
    assert_eq!((stats.rows, stats.done), (1, 1));
}

#[test]
fn calls_outlast_a_restart_of_the_server() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("q.sqlite");
    let now = Arc::new(AtomicU64::new(0));
    let server = serve(&path, LIMITS, 0, &now);
    let port = server.address().port();
    let queue = client(&server);
    queue.join(&trainer()).unwrap();
    queue.put(&[row("a", 1), row("b", 1)]).unwrap();
    let loan = queue.lease(&ask(1), 0).unwrap();
    let seen = queue.wait(0, Duration::ZERO).unwrap();
    RUNTIME.block_on(server.stop());
    std::thread::scope(|scope| {
        // It asks until it is answered.
        let put = scope.spawn(|| queue.put(&[row("b", 1), row("c", 1)]).unwrap());
        let server = serve(&path, LIMITS, port, &now);
        assert_eq!(
            put.join().unwrap(),
            [PutOutcome::Duplicate, PutOutcome::New]
        );
        // A lease of before is still one.
        let done = [AckedRow::of("a")];
        let acked = queue.ack("trainer", loan.lease.unwrap(), &done).unwrap();
        assert_eq!(acked.changed, 1);
        // A change of before is none of this server's.
        assert_ne!(queue.wait(seen, PATIENCE).unwrap(), seen);
        let state = queue.state("trainer", "a").unwrap();
        assert_eq!(state, Some(RowState::Acked));
        RUNTIME.block_on(server.stop());
    });
}

#[test]
fn a_server_that_is_away_is_waited_for_as_long_as_it_says() {
    // Nothing listens at the port of a listener that is gone.
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr();
    let url = format!("http://{}", gone.unwrap());
    let queue = HttpQueue::new(&url, TOKEN, Duration::ZERO).unwrap();
    let error = queue.stats().unwrap_err().to_string();
    assert!(
        error.contains(&url) && error.contains("sinew queue serve"),
        "{error}"
    );
    let wrong = HttpQueue::new("127.0.0.1:1", TOKEN, Duration::ZERO).unwrap_err();
    assert!(wrong.to_string().contains("http://"), "{wrong}");
}

/// Status line and body of a request as it is.
fn raw(address: std::net::SocketAddr, request: &str, body: &[u8]) -> (String, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    let length = body.len();
    let head = format!("{request}host: h\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let status = answer.split(' ').nth(1).unwrap().to_owned();
    let body = answer.split("\r\n\r\n").nth(1).unwrap_or_default();
    (status, body.to_owned())
}

#[test]
fn what_is_no_call_is_refused_and_the_server_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let now = Arc::new(AtomicU64::new(0));
    let server = serve(&directory.path().join("q.sqlite"), LIMITS, 0, &now);
    let at = server.address();
    let bearer = format!("authorization: Bearer {TOKEN}\r\n");
    for (request, body, status) in [
        ("POST /queue HTTP/1.1\r\n".to_owned(), &b"x"[..], "401"),
        ("GET /queue HTTP/1.1\r\n".to_owned(), b"", "401"),
        (
            "GET /queue/wait?seen=0&ms=0 HTTP/1.1\r\n".to_owned(),
            b"",
            "401",
        ),
        (
            "GET /queue HTTP/1.1\r\nauthorization: Bearer no\r\n".to_owned(),
            b"",
            "401",
        ),
        (format!("POST /queue HTTP/1.1\r\n{bearer}"), b"", "400"),
        (
            format!("POST /queue HTTP/1.1\r\n{bearer}"),
            &[0xdd, 0xff, 0xff, 0xff, 0xff],
            "400",
        ),
        (format!("PUT /queue HTTP/1.1\r\n{bearer}"), b"", "405"),
        (
            format!("GET /queue/wait?seen=x&ms=0 HTTP/1.1\r\n{bearer}"),
            b"",
            "400",
        ),
        (
            format!("GET /queue/wait?seen=0&ms=0&more=1 HTTP/1.1\r\n{bearer}"),
            b"",
            "400",
        ),
        (format!("GET /nothing HTTP/1.1\r\n{bearer}"), b"", "404"),
        (
            format!(
                "POST /queue HTTP/1.1\r\n{bearer}sinew-call: {}\r\n",
                "x".repeat(99)
            ),
            b"",
            "400",
        ),
        ("GET /health HTTP/1.1\r\n".to_owned(), b"", "200"),
    ] {
        let (got, body) = raw(at, &request, body);
        assert_eq!(got, status, "{request}{body}");
    }
    let (status, body) = raw(at, &format!("GET /queue HTTP/1.1\r\n{bearer}"), b"");
    assert_eq!(status, "200");
    assert!(body.contains("\"rows\":0"), "{body}");
    let stranger = HttpQueue::new(&format!("http://{at}"), "another", PATIENCE).unwrap();
    let refused = stranger.stats().unwrap_err();
    assert!(matches!(refused, StoreError::Remote { .. }), "{refused}");
    assert!(refused.to_string().contains("token"), "{refused}");
    client(&server).stats().unwrap();
}

#[test]
fn waits_end_with_a_change_and_with_the_server() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("q.sqlite");
    let now = Arc::new(AtomicU64::new(0));
    let server = serve(&path, LIMITS, 0, &now);
    let queue = client(&server);
    queue.join(&trainer()).unwrap();
    std::thread::scope(|scope| {
        let waits: Vec<_> = (0..20)
            .map(|_| {
                let seen = queue.wait(0, Duration::ZERO).unwrap();
                let queue = &queue;
                scope.spawn(move || queue.wait(seen, PATIENCE).unwrap() != seen)
            })
            .collect();
        queue.put(&[row("a", 1)]).unwrap();
        assert!(waits.into_iter().all(|w| w.join().unwrap()));
    });
    // The back-pressure of a queue that is full reaches its producers.
    let many: Vec<_> = (0..15).map(|n| row(&format!("k{n}"), 1)).collect();
    queue.put(&many).unwrap();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| put_within(&queue, &[row("z", 1)], PATIENCE).unwrap());
        let loan = queue.lease(&ask(1), 0).unwrap();
        let done = [AckedRow::of(&loan.rows[0].key)];
        queue.ack("trainer", loan.lease.unwrap(), &done).unwrap();
        assert_eq!(waits.join().unwrap(), [PutOutcome::New]);
    });
    let seen = queue.wait(0, Duration::ZERO).unwrap();
    let short = HttpQueue::new(
        &format!("http://{}", server.address()),
        TOKEN,
        Duration::ZERO,
    );
    let short = short.unwrap();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| short.wait(seen, PATIENCE));
        RUNTIME.block_on(server.stop());
        // The same number, or that nothing listens any more: it does not wait any longer.
        let ended = waits.join().unwrap();
        assert!(ended.is_err() || ended.unwrap() == seen);
    });
}
