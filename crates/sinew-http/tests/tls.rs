//! Both clients and the server over real TLS on the loopback address.
#![cfg(all(feature = "blocking", feature = "authority"))]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use axum::Router;
use axum::routing::get;
use sinew_http::server::{ConnectionLimits, Endpoint, Guard, serve};
use sinew_http::{
    Authorities, Client, ClientOptions, HOST_TIME, HttpError, Method, OwnCa, TlsIdentity, blocking,
    own_ca,
};
use std::net::SocketAddr;
use std::time::{Duration, SystemTime};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// A server that says hello until the test ends.
async fn server(tls: Option<TlsIdentity>, limits: ConnectionLimits) -> SocketAddr {
    let address = SocketAddr::from(([127, 0, 0, 1], 0));
    let listener = Endpoint { address, tls }.bind().await.unwrap();
    let bound = listener.local_addr().unwrap();
    let router = Router::new().route("/", get(async || "hello"));
    let guard = Guard::new(limits, |_| None);
    tokio::spawn(serve(listener, router, guard, std::future::pending()));
    bound
}

/// An authority, and the identity of a host that it signed.
fn made(folder: &tempfile::TempDir, host: &str) -> (OwnCa, TlsIdentity) {
    let ca = own_ca(folder.path()).unwrap();
    let issued = ca.issue(&[host.to_owned()], HOST_TIME).unwrap();
    (ca, issued.identity().unwrap())
}

fn trusting(ca: &OwnCa) -> ClientOptions {
    ClientOptions {
        deadline: Some(Duration::from_secs(30)),
        authorities: Some(Authorities::from_file(&ca.file()).unwrap()),
        ..ClientOptions::default()
    }
}

async fn ask(options: ClientOptions, url: &str) -> Result<String, HttpError> {
    let client = Client::new(options).unwrap();
    let answer = client.ask(client.request(Method::GET, url)).await?;
    Ok(String::from_utf8(answer.success(200)?).unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_clients_reach_a_server_whose_authority_they_trust() {
    let folder = tempfile::tempdir().unwrap();
    let (ca, identity) = made(&folder, "127.0.0.1");
    let address = server(Some(identity), ConnectionLimits::default()).await;
    let url = format!("https://{address}/");
    assert_eq!(ask(trusting(&ca), &url).await.unwrap(), "hello");
    let options = trusting(&ca);
    let said = std::thread::spawn(move || {
        let client = blocking::Client::new(options).unwrap();
        client.ask(client.request(Method::GET, &url)).unwrap().body
    });
    assert_eq!(said.join().unwrap(), b"hello");
    // Files of another process give the same.
    let issued = ca.issue(&["127.0.0.1".into()], HOST_TIME).unwrap();
    let (certificate, key) = issued.write(folder.path(), "host").unwrap();
    let identity = TlsIdentity::from_files(&certificate, &key).unwrap();
    let address = server(Some(identity), ConnectionLimits::default()).await;
    let said = ask(trusting(&ca), &format!("https://{address}/")).await;
    assert_eq!(said.unwrap(), "hello");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_that_cannot_be_trusted_is_refused_with_the_reason() {
    let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (ca, identity) = made(&folder, "127.0.0.1");
    let (wrong, _) = made(&other, "127.0.0.1");
    let refused = async |options: ClientOptions, identity: TlsIdentity, url: &str| {
        let address = server(Some(identity), ConnectionLimits::default()).await;
        let url = url.replace("PORT", &address.port().to_string());
        let error = ask(options, &url).await.unwrap_err();
        assert!(matches!(error, HttpError::Connect { .. }), "{error:?}");
        error.to_string()
    };
    let here = "https://127.0.0.1:PORT/";
    let error = refused(trusting(&wrong), identity.clone(), here).await;
    assert!(error.contains("--tls-ca"), "{error}");
    let nothing = ClientOptions::default();
    let error = refused(nothing, identity.clone(), here).await;
    assert!(error.contains("SINEW_TLS_CA"), "{error}");
    let error = refused(trusting(&ca), identity, "https://localhost:PORT/").await;
    assert!(error.contains("--tls-host"), "{error}");
    let past = SystemTime::now() - Duration::from_secs(3 * 86_400);
    let expired = ca.issue_until(&["127.0.0.1".into()], past).unwrap();
    let error = refused(trusting(&ca), expired.identity().unwrap(), here).await;
    assert!(error.contains("expired"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plain_and_tls_that_meet_say_so() {
    let folder = tempfile::tempdir().unwrap();
    let (ca, identity) = made(&folder, "127.0.0.1");
    let address = server(Some(identity), ConnectionLimits::default()).await;
    let error = ask(trusting(&ca), &format!("http://{address}/")).await;
    let error = error.unwrap_err().to_string();
    assert!(error.contains("this port speaks TLS"), "{error}");
    let address = server(None, ConnectionLimits::default()).await;
    let error = ask(trusting(&ca), &format!("https://{address}/")).await;
    let error = error.unwrap_err().to_string();
    assert!(error.contains("does not speak TLS"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_never_shake_hands_are_closed() {
    let folder = tempfile::tempdir().unwrap();
    let (ca, identity) = made(&folder, "127.0.0.1");
    let limits = ConnectionLimits {
        handshake_time: Duration::from_millis(50),
        without_key_per_address: 2,
        ..ConnectionLimits::default()
    };
    let address = server(Some(identity.clone()), limits).await;
    for first in [&b""[..], &[0x16], &[0x16, 3, 1, 0, 200, 1], &[0, 1, 2]] {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(first).await.unwrap();
        let mut said = Vec::new();
        // An end or a reset: both close it.
        let _ = stream.read_to_end(&mut said).await;
        // An alert of TLS may come, never an answer.
        assert!(!said.starts_with(b"HTTP"), "{said:?}");
    }
    // Those that wait give way to one that speaks.
    let limits = ConnectionLimits {
        without_key: 2,
        without_key_per_address: 2,
        handshake_time: Duration::from_secs(600),
        key_time: Duration::from_secs(600),
        ..ConnectionLimits::default()
    };
    let address = server(Some(identity), limits).await;
    let mut waiting = Vec::new();
    for _ in 0..4 {
        waiting.push(TcpStream::connect(address).await.unwrap());
    }
    let said = ask(trusting(&ca), &format!("https://{address}/")).await;
    assert_eq!(said.unwrap(), "hello");
}
