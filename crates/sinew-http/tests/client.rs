//! Both clients against a listener whose answers are written here.
#![cfg(feature = "blocking")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use sinew_http::{
    Answer, ClientOptions, Failure, HttpError, Method, Retry, address, bearer, blocking, may_pass,
    retry_after,
};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread::JoinHandle;
use std::time::Duration;

/// Answers one request of each connection, the last answer for ever if it is empty, and returns the number of
/// connections.
fn serve(answers: &[&str]) -> (String, JoinHandle<usize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/a", listener.local_addr().unwrap());
    let answers: Vec<String> = answers.iter().map(|a| (*a).to_owned()).collect();
    let served = std::thread::spawn(move || {
        for answer in &answers {
            let (mut stream, _) = listener.accept().unwrap();
            let (mut head, mut byte) = (Vec::new(), [0]);
            while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap() == 1 {
                head.push(byte[0]);
            }
            if answer.is_empty() {
                // Until the client goes.
                drop(stream.read(&mut byte))
            } else {
                // A client that has read enough closes the connection.
                drop(stream.write_all(answer.as_bytes()))
            }
        }
        answers.len()
    });
    (url, served)
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    runtime.enable_all().build().unwrap().block_on(future)
}

/// One request of each client, with a listener each.
fn ask(options: &ClientOptions, answers: &[&str]) -> [Result<Answer, HttpError>; 2] {
    let (url, served) = serve(answers);
    let client = blocking::Client::new(options.clone()).unwrap();
    let first = client.ask(client.request(Method::GET, &url));
    drop(client);
    served.join().unwrap();
    let (url, served) = serve(answers);
    let second = block_on(async {
        let client = sinew_http::Client::new(options.clone()).unwrap();
        client.ask(client.request(Method::GET, &url)).await
    });
    served.join().unwrap();
    [first, second]
}

fn text(status: &str, more: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\nconnection: close\r\n{more}\r\n{body}")
}

#[test]
fn bodies_are_bounded() {
    let options = ClientOptions {
        body_max: 10,
        ..ClientOptions::default()
    };
    let fits = text("200 OK", "", "0123456789");
    for answer in ask(&options, &[&fits]) {
        assert_eq!(answer.unwrap().body, b"0123456789");
    }
    for more in ["", "content-length: 11\r\n"] {
        let long = text("200 OK", more, "0123456789x");
        for answer in ask(&options, &[&long]) {
            let error = answer.unwrap_err();
            assert_eq!(error, HttpError::TooLarge(10));
            assert_eq!(error.to_string(), "the answer is longer than 10 bytes");
        }
    }
    let refusal = text("404 Not Found", "", "no\nsuch thing, and more");
    for answer in ask(&options, &[&refusal]) {
        let answer = answer.unwrap();
        assert_eq!(answer.body, b"no\nsuch th");
        let error = answer.success(6).unwrap_err();
        assert_eq!(error.to_string(), "status 404: no suc");
    }
    let whole = HttpError::TooLarge(16 << 20).to_string();
    assert_eq!(whole, "the answer is longer than 16 MiB");
}

#[test]
fn redirects_are_followed_up_to_their_number() {
    let mut options = ClientOptions::default();
    let away = text("302 Found", "location: /b\r\n", "");
    let there = text("200 OK", "", "b");
    for answer in ask(&options, &[&away]) {
        assert_eq!(answer.unwrap().status, 302);
    }
    options.redirects = 1;
    for answer in ask(&options, &[&away, &there]) {
        assert_eq!(answer.unwrap().body, b"b");
    }
    for answer in ask(&options, &[&away, &away]) {
        assert!(matches!(answer, Err(HttpError::Redirect(_))), "{answer:?}");
    }
}

#[test]
fn a_server_that_is_silent_is_left() {
    let short = Some(Duration::from_millis(500));
    let deadline = ClientOptions {
        deadline: short,
        ..ClientOptions::default()
    };
    let stall = ClientOptions {
        stall: short,
        ..ClientOptions::default()
    };
    for options in [deadline, stall] {
        for answer in ask(&options, &[""]) {
            assert!(matches!(answer, Err(HttpError::Deadline(_))), "{answer:?}");
        }
    }
}

#[test]
fn broken_connections_are_told_apart() {
    let options = ClientOptions::default();
    let half = text("200 OK", "content-length: 10\r\n", "abc");
    for answer in ask(&options, &[&half]) {
        assert!(matches!(answer, Err(HttpError::Body(_))), "{answer:?}");
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let client = blocking::Client::new(options).unwrap();
    let refused = client.ask(client.request(Method::GET, &url));
    let refused = refused.unwrap_err();
    assert!(
        matches!(refused, HttpError::Connect { late: false, .. }),
        "{refused:?}"
    );
    let client = blocking::Client::new(ClientOptions {
        https_only: true,
        ..ClientOptions::default()
    });
    let client = client.unwrap();
    let plain = client.ask(client.request(Method::GET, &url)).unwrap_err();
    assert!(matches!(plain, HttpError::Address(_)), "{plain:?}");
}

/// One attempt of a request that is repeated.
fn heard(answer: Result<Answer, HttpError>) -> Result<u16, Failure<u16>> {
    let answer = answer?;
    match answer.status.as_u16() {
        status if may_pass(status) => {
            let why = format!("it answered {status}");
            Err(Failure::Passing(why, retry_after(&answer.headers)))
        }
        200 => Ok(200),
        status => Err(Failure::Lasting(status)),
    }
}

/// A request of each client that is repeated, and its connections.
fn repeat(
    schedule: Retry,
    answers: &[&str],
    allowed: fn(Duration) -> Option<Duration>,
) -> [Result<u16, Failure<u16>>; 2] {
    let (url, served) = serve(answers);
    let client = blocking::Client::new(ClientOptions::default()).unwrap();
    let attempt = || heard(client.ask(client.request(Method::GET, &url)));
    let first = blocking::retry(schedule, allowed, attempt);
    assert_eq!(served.join().unwrap(), answers.len());
    let (url, served) = serve(answers);
    let second = block_on(async {
        let client = sinew_http::Client::new(ClientOptions::default()).unwrap();
        let attempt = || async { heard(client.ask(client.request(Method::GET, &url)).await) };
        sinew_http::retry(schedule, allowed, attempt).await
    });
    assert_eq!(served.join().unwrap(), answers.len());
    [first, second]
}

#[test]
fn requests_are_repeated_while_they_may_pass() {
    let hour = Duration::from_secs(3600);
    // The pauses of the schedule would take hours: the server names shorter ones.
    let schedule = Retry::doubling(3, hour, hour);
    let busy = text("503 Service Unavailable", "retry-after: 0\r\n", "");
    let down = text("500 Internal Server Error", "", "");
    let (good, no) = (text("200 OK", "", ""), text("400 Bad Request", "", ""));
    assert_eq!(
        repeat(schedule, &[&busy, &busy, &good], Some),
        [Ok(200), Ok(200)]
    );
    let passing = |status: u16, pause: Option<Duration>| {
        let failure = Failure::Passing(format!("it answered {status}"), pause);
        [Err(failure.clone()), Err(failure)]
    };
    let last = passing(503, Some(Duration::ZERO));
    assert_eq!(repeat(schedule, &[&busy, &busy, &busy], Some), last);
    let lasting = [Err(Failure::Lasting(400)), Err(Failure::Lasting(400))];
    assert_eq!(repeat(schedule, &[&busy, &no], Some), lasting);
    // The caller has no time for the pause.
    assert_eq!(repeat(schedule, &[&down], |_| None), passing(500, None));
    let shortened = |_: Duration| Some(Duration::ZERO);
    assert_eq!(
        repeat(schedule, &[&down, &good], shortened),
        [Ok(200), Ok(200)]
    );
}

#[test]
fn addresses_and_keys_are_checked() {
    assert_eq!(address("http://h:1/v1").unwrap().path(), "/v1");
    for (url, why) in [
        ("h", "must start with http"),
        ("h:1", "must start with http"),
        ("ftp://h", "must start with http"),
        ("http://", "host"),
    ] {
        let error = address(url).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
    let shown = format!("{:?}", bearer("secret").unwrap());
    assert!(!shown.contains("secret"), "{shown}");
    assert!(bearer("a\nb").unwrap_err().to_string().contains("the key"));
}
