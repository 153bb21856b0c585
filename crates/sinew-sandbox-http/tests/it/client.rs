//! The port over a real server in this process, with sandboxes of the process level.

use sinew_sandbox::{
    Ending, ExecOptions, ExecRequest, Network, ProcessConfig, ProcessProvider, Program, Sandbox,
    SandboxError, SandboxProvider, SandboxSpec, Terminal, TerminalInput, TerminalSize,
};
use sinew_sandbox_http::client::{RemoteConfig, RemoteProvider};
use sinew_sandbox_http::{Bounds, Service, Tokens, serve};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;

const TOKEN: &str = "ann-0123456789abcdef";

/// A server with at most so many sandboxes of an owner.
struct Server {
    service: Arc<Service>,
    url: String,
    task: tokio::task::JoinHandle<()>,
}

impl Server {
    async fn start(sandboxes: usize) -> Self {
        let provider: Arc<dyn SandboxProvider> =
            Arc::new(ProcessProvider::start(ProcessConfig::new("")).unwrap());
        let bounds = Bounds {
            sandboxes,
            ..Bounds::default()
        };
        let tokens = Tokens::parse(&format!("ann:{TOKEN}")).unwrap();
        let other = Arc::new(ProcessProvider::start(ProcessConfig::new("")).unwrap());
        let service = Service::new(vec![provider], tokens, bounds, None);
        let env = [("KIND".to_owned(), "other".to_owned())];
        let service = Arc::new(service.with_image("other".into(), other, env));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let own = Arc::clone(&service);
        let task = tokio::spawn(async move {
            serve(listener, own, std::future::pending()).await.unwrap();
        });
        Self { service, url, task }
    }

    fn config(&self) -> RemoteConfig {
        RemoteConfig {
            servers: vec![self.url.clone()],
            token: TOKEN.into(),
            level: "process",
            image: None,
            max_live: 8,
            finder: None,
        }
    }

    fn connect(&self) -> RemoteProvider {
        RemoteProvider::connect(self.config()).unwrap()
    }

    /// Waits until the server holds this many sandboxes.
    async fn holds(&self, count: usize) {
        let held = async {
            while self.service.live().0 != count {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let held = tokio::time::timeout(Duration::from_secs(120), held).await;
        held.expect("sandboxes that nothing holds are destroyed");
    }
}

fn python(code: &str) -> ExecRequest {
    ExecRequest::new(Program::Python(code.into()), Duration::from_secs(60))
}

async fn said(sandbox: &mut dyn Sandbox, code: &str) -> String {
    let result = sandbox.exec(python(code)).await.unwrap();
    String::from_utf8_lossy(&result.stdout).trim().to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_of_another_host_does_what_one_of_this_host_does() {
    let server = Server::start(8).await;
    let remote = server.connect();
    let local = ProcessProvider::start(ProcessConfig::new("")).unwrap();
    assert_eq!(remote.protections(), local.protections());
    let spec = SandboxSpec {
        env: vec![("COLOUR".into(), "blue".into())],
        ..SandboxSpec::default()
    };
    let mut outcomes = Vec::new();
    for provider in [&remote as &dyn SandboxProvider, &local] {
        let mut sandbox = provider.acquire(&spec).await.unwrap();
        let mut request = python(
            "import os, sys\nprint(os.environ['COLOUR'], os.environ['SIZE'], sys.stdin.read())\n\
             sys.stdout.buffer.write(bytes([255, 0]))\nsys.exit(3)",
        );
        request.stdin = vec![b'a', b'\n', b'b'];
        let options = ExecOptions {
            env: vec![("SIZE".into(), "9".into())],
            ..ExecOptions::default()
        };
        let result = sandbox.exec_with(request, options).await.unwrap();
        let path = "folder with spaces/é?#%.bin";
        sandbox.write_file(path, &[0, 1, 255]).await.unwrap();
        let content = sandbox.read_file(path, 10).await.unwrap();
        let too_long = sandbox.read_file(path, 2).await.is_err();
        let missing = sandbox.read_file("missing", 10).await.is_err();
        let files = sandbox.stats().await.unwrap().file_count;
        sandbox.reset().await.unwrap();
        let gone = sandbox.read_file(path, 10).await.is_err();
        sandbox.destroy().await.unwrap();
        outcomes.push((
            result.ending,
            result.stdout,
            result.truncated,
            content,
            (too_long, missing, files, gone),
        ));
    }
    assert_eq!(outcomes[0], outcomes[1]);
    assert_eq!(outcomes[0].0, Ending::Exited { code: 3 });
    server.holds(0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn snapshots_are_forked_exported_and_imported() {
    let server = Server::start(8).await;
    let remote = server.connect();
    let spec = SandboxSpec::default();
    let mut first = remote.acquire(&spec).await.unwrap();
    first.write_file("x", b"1").await.unwrap();
    let snapshot = first.snapshot().await.unwrap();
    first.write_file("x", b"2").await.unwrap();
    let mut fork = remote.fork(&spec, &snapshot).await.unwrap();
    let read = "print(open('x').read())";
    assert_eq!(said(fork.as_mut(), read).await, "1");
    let archive = remote.export(&snapshot).await.unwrap();
    let copy = remote.import(&archive, 1 << 20).await.unwrap();
    assert_eq!(remote.export(&copy).await.unwrap(), archive);
    let mut copied = remote.fork(&spec, &copy).await.unwrap();
    assert_eq!(said(copied.as_mut(), read).await, "1");
    // An archive of this host's level can be used there.
    let local = ProcessProvider::start(ProcessConfig::new("")).unwrap();
    let here = local.import(&archive, 1 << 20).await.unwrap();
    let refused = remote.fork(&spec, &here).await.err().unwrap().to_string();
    assert!(refused.contains("same sandbox server"), "{refused}");
    let mut here = local.fork(&spec, &here).await.unwrap();
    assert_eq!(said(here.as_mut(), read).await, "1");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sandboxes_of_a_named_image_have_its_variables_and_their_own_snapshots() {
    let server = Server::start(8).await;
    let of = |image: &str| {
        RemoteProvider::connect(RemoteConfig {
            image: Some(image.into()),
            ..server.config()
        })
    };
    let refused = of("else").err().unwrap().to_string();
    assert!(
        refused.contains("\"else\"") && refused.contains("allowed for sandbox.image: other"),
        "{refused}"
    );
    let (plain, other) = (server.connect(), of("other").unwrap());
    let kind = "import os\nprint(os.environ.get('KIND'))";
    let spec = SandboxSpec::default();
    let mut without = plain.acquire(&spec).await.unwrap();
    assert_eq!(said(without.as_mut(), kind).await, "None");
    let mut first = other.acquire(&spec).await.unwrap();
    assert_eq!(said(first.as_mut(), kind).await, "other");
    first.write_file("x", b"1").await.unwrap();
    let snapshot = first.snapshot().await.unwrap();
    let archive = other.export(&snapshot).await.unwrap();
    let copy = other.import(&archive, 1 << 20).await.unwrap();
    for snapshot in [&snapshot, &copy] {
        let mut fork = other.fork(&spec, snapshot).await.unwrap();
        assert_eq!(said(fork.as_mut(), kind).await, "other");
        assert_eq!(said(fork.as_mut(), "print(open('x').read())").await, "1");
    }
    // Snapshots of another root are refused.
    let here = without.snapshot().await.unwrap();
    let refused = other.fork(&spec, &here).await.err().unwrap().to_string();
    assert!(refused.contains("image"), "{refused}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn output_comes_while_the_program_runs_and_a_dropped_call_ends_it() {
    let server = Server::start(8).await;
    let remote = server.connect();
    let mut sandbox = remote.acquire(&SandboxSpec::default()).await.unwrap();
    let (sender, mut output) = tokio::sync::mpsc::channel(1);
    let options = ExecOptions {
        output: Some(sender),
        ..ExecOptions::default()
    };
    let endless = "print('first', flush=True)\nimport time\nwhile True: time.sleep(9)";
    let run = sandbox.exec_with(python(endless), options);
    let seen = async {
        let chunk = output.recv().await.unwrap();
        String::from_utf8(chunk.bytes).unwrap()
    };
    tokio::select! {
        result = run => panic!("it does not end: {result:?}"),
        seen = seen => assert_eq!(seen, "first\n"),
    }
    // The server kills what ran; until then the sandbox is in use.
    let free = async {
        loop {
            match sandbox.exec(python("print(6 * 7)")).await {
                Ok(result) => return result,
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    };
    let result = tokio::time::timeout(Duration::from_secs(120), free).await;
    assert_eq!(result.unwrap().stdout, b"42\n");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_on_a_terminal_of_another_host() {
    let server = Server::start(8).await;
    let remote = server.connect();
    let mut sandbox = remote.acquire(&SandboxSpec::default()).await.unwrap();
    let shell = || ExecRequest {
        program: Program::Argv(vec!["/bin/sh".into()]),
        ..python("")
    };
    let session = || {
        let (typing, input) = tokio::sync::mpsc::channel(4);
        let (output, shown) = tokio::sync::mpsc::channel(4);
        let size = TerminalSize {
            rows: 30,
            columns: 100,
        };
        let terminal = Terminal {
            size,
            env: vec![("A".into(), "b".into())],
            input,
            output,
        };
        (terminal, typing, shown)
    };
    async fn sees(shown: &mut tokio::sync::mpsc::Receiver<Vec<u8>>, text: &str) {
        let mut all = String::new();
        while !all.contains(text) {
            let more = shown
                .recv()
                .await
                .unwrap_or_else(|| panic!("no {text:?} in {all:?}"));
            all += &String::from_utf8_lossy(&more);
        }
    }
    let (terminal, typing, mut shown) = session();
    let user = async {
        let typed = |text: &str| TerminalInput::Typed(text.as_bytes().to_vec());
        typing
            .send(typed("stty size; echo $A-$((6 * 7))\n"))
            .await
            .unwrap();
        sees(&mut shown, "30 100\r\nb-42\r\n").await;
        let size = TerminalSize {
            rows: 5,
            columns: 7,
        };
        typing.send(TerminalInput::Resized(size)).await.unwrap();
        typing.send(typed("stty size\n")).await.unwrap();
        sees(&mut shown, "5 7\r\n").await;
        typing.send(typed("exit 3\n")).await.unwrap();
        while shown.recv().await.is_some() {}
    };
    let (result, ()) = tokio::join!(sandbox.exec_on_terminal(shell(), terminal), user);
    assert_eq!(result.unwrap().ending, Ending::Exited { code: 3 });
    assert_eq!(said(sandbox.as_mut(), "print(1)").await, "1");
    // A user who hangs up ends the session there.
    let (terminal, typing, mut shown) = session();
    let user = async {
        sees(&mut shown, "$ ").await;
        drop(typing);
        while shown.recv().await.is_some() {}
    };
    let (result, ()) = tokio::join!(sandbox.exec_on_terminal(shell(), terminal), user);
    let error = result.unwrap_err();
    assert!(error.to_string().contains("hung up"), "{error}");
    drop(sandbox);
    server.holds(0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_server_is_waited_for_and_a_drop_destroys() {
    let server = Server::start(1).await;
    let remote = server.connect();
    let spec = SandboxSpec::default();
    let first = remote.acquire(&spec).await.unwrap();
    let second = async {
        let mut second = remote.acquire(&spec).await.unwrap();
        said(second.as_mut(), "print(1)").await
    };
    let freed = async {
        // Long enough that the server has refused at least once.
        tokio::time::sleep(Duration::from_millis(100)).await;
        drop(first);
    };
    let (said, ()) = tokio::join!(second, freed);
    assert_eq!(said, "1");
    server.holds(0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_is_refused_with_the_reason() {
    let server = Server::start(8).await;
    let refused = |change: &dyn Fn(&mut RemoteConfig)| {
        let mut config = server.config();
        change(&mut config);
        RemoteProvider::connect(config).unwrap_err().to_string()
    };
    for (why, said) in [
        (refused(&|c| c.token = "wrong".into()), "server_key_env"),
        (
            refused(&|c| c.level = "microvm"),
            "allowed for sandbox.level: process",
        ),
        (
            refused(&|c| c.servers = vec!["10.0.0.7".into()]),
            "http:// or https://",
        ),
        (
            refused(&|c| c.servers = vec!["http://127.0.0.1:1".into()]),
            "sinew serve --sandbox-only",
        ),
    ] {
        assert!(why.contains(said), "{why}");
    }
    let remote = server.connect();
    let loopback = SandboxSpec {
        network: Network::Loopback,
        ..SandboxSpec::default()
    };
    let error = remote.acquire(&loopback).await.err().unwrap();
    assert!(matches!(error, SandboxError::Unsupported { .. }), "{error}");
    let mut sandbox = remote.acquire(&SandboxSpec::default()).await.unwrap();
    server.task.abort();
    assert!(server.task.await.unwrap_err().is_cancelled());
    // The server is gone: the sandbox is dead, which its holder sees.
    server.service.close().await;
    let error = sandbox.exec(python("print(1)")).await.unwrap_err();
    assert!(matches!(error, SandboxError::HostLost { .. }), "{error}");
    assert!(sandbox.is_dead());
}
